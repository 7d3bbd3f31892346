"""Tables, pages and pictures, made from what runs wrote."""
