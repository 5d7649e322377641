"""Two-party inference: a client and a server compute together, and neither sees the other's input.

Programs are written against `cloister.crypto.computer.Computer`. `cloister.crypto.engine` runs them with the protocols
of the Rust core over a real link; `cloister.crypto.plain` computes the same integers without privacy, as the oracle and
for accuracy work on whole data sets. Only this folder imports the native module. docs/crypto-engine.md explains the
design.
"""
