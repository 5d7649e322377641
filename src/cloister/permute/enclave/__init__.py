"""The enclave path of the STIP paper (section IV-E), made correct where its formulas are not.

Four functions of the model run in a process of their own that holds the model developer's secrets: the embedding
with a one-time scaling of every row, the softmax of the first layer, the last norm, and the inverse of the output
transform. Pre-norm models need a fifth, which takes the scaling off the residual stream again.

    theorem.py    which models the scaling can be undone for, and why not for the others
    bundle.py     what the enclave is given: a directory with its secrets
    functions.py  the functions themselves, in numpy
    protocol.py   the narrow messages between server and enclave
    process.py    the enclave's side: `python -m cloister.permute.enclave`
    client.py     the server's side of the messages
    host.py       a transformers model with those functions handed to the enclave
    measure.py    what the path costs

What it is worth is said in docs/enclave.md: against the server it adds nothing to the permutation, because the scaling
can be read off the enclave's own output. It keeps the embedding table and the inverse transform out of the users'
hands. For protection from the server, run the whole server in a confidential virtual machine (docs/attestation.md).
"""

from cloister.permute.enclave.theorem import Form, form_of, theorem2_holds

__all__ = ["Form", "form_of", "theorem2_holds"]
