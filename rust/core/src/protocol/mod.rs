//! Everything that is not linear, from oblivious transfer: each step on additive shares, with its plain twin and its error bound.
