"""What several test files share: small federations, run folders made by hand, naive versions to compare with."""
