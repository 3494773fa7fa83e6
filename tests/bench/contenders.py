"""Who runs in the matmul sets: eager, TorchInductor searching harder, reflib by its static choice, reflib measuring."""

EAGER, PEER_MAX, US = "eager", "Inductor max", "reflib"
TUNED = "reflib tuned"  # autotune="blocking"
