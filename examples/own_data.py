"""Your own data: arrays with a site for each sample. Run it with `python examples/own_data.py`.

The arrays here come with scikit-learn: 569 tumours, 30 measurements each, malignant or benign. The four sites are made up:
they see tumours of different size, so their mix of classes differs.
"""

import numpy as np
from sklearn.datasets import load_breast_cancer

import protofed as pf
from protofed.data import Dataset

x, y = load_breast_cancer(return_X_y=True)
site = np.searchsorted(np.quantile(x[:, 0], [0.25, 0.5, 0.75]), x[:, 0])
data = Dataset.from_arrays(x, y, group_train=site, class_names=("malignant", "benign"), name="tumours").standardised()

if __name__ == "__main__":  # a comparison starts processes of its own, and they read this file again
    comparison = pf.compare(
        ["fedproto", "fedsap"],
        data=data,
        partition="natural",  # one client a site
        clients=4,
        test="local",  # each site is tested on a fifth of its own samples
        rounds=20,
        seeds=2,
    )
    for method, runs in comparison.results.items():
        print(method, *(f"head {r.accuracy_head:.1%}, prototype {r.accuracy_prototype:.1%}" for r in runs), sep="  ")
