"""Attacks that Cloister runs on its own output, so that no mode is sold for more than it is worth.

One file per attack; each says who can run it, what it needs and what it wins. All are pure functions of numpy arrays:
no model classes, no sockets, no secrets. `cloister.permute.recovery` runs those that fit what a server holds and sees,
`python -m cloister.permute.attacks.table` prints their measured strength on a real model and real texts.

    sorted_rows           permutation, public table: sort each row, then learn the order of the features
    gram                  orthogonal, public table: norms and inner products, with or without known tokens
    weights               both, public base: the transform from the uploaded weights alone
    output_vocabulary     both, public head: the order of the output vocabulary
    equality              any base: equal tokens are seen to be equal
    frequency             secret base: a substitution cipher falls to word and bigram counts
    contexts              secret base: two deployments of one model are linked by their weights
    known_rows            known plaintext, and the curious account that holds a client directory
    row_scaling           the enclave path: its scaling is in its own output
    distance_correlation  the paper's measure, and the real one: neither says what an attacker recovers
    noise                 what is sold elsewhere: Gaussian noise on embeddings
"""
