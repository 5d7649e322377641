//! Lattice encryption: the ring, its transforms, keys, seeded ciphertexts, and the parameter table.
