"""What the one-time scaling is worth against the server: nothing. Both ways of seeing that, on a real enclave."""

from __future__ import annotations

import numpy as np
import torch

from cloister.permute.attacks.row_scaling import recover_row_scaling


def test_scaling_is_read_off_the_enclaves_own_output(serving):
    served = serving("bert without biases")
    values = served.values(batch=1, rows=12)
    seen: dict[str, np.ndarray] = {}
    ask = served.enclave.softmax
    served.enclave.softmax = lambda scores, session, scale: seen.setdefault(
        "weights", ask(scores, session, scale).copy()
    )
    served.wired.open(values)
    sent = served.wired._rows[0].double().numpy()  # alpha x pi, what the server holds
    served.wired.forward(values)
    rows = served.enclave.embed(values)[1]
    assert not np.allclose(rows, sent)  # fresh scaling for every request
    # The scaling that the second request drew, from what the server saw of that request.
    seen.clear()
    held: dict[str, np.ndarray] = {}
    opened = served.wired.open
    served.wired.open = lambda *given: (opened(*given), held.update(rows=served.wired._rows[0].double().numpy()))[0]
    served.wired.forward(values)
    found = recover_row_scaling(seen["weights"][0])
    plain = served.expected_rows(values)[0]
    alpha = (held["rows"] * plain).sum(-1) / (plain * plain).sum(-1)
    assert np.abs(found / found[0] / (alpha / alpha[0]) - 1).max() < 1e-4
    # With it the server has the embeddings as if they had never been scaled.
    unscaled = held["rows"] / found[:, None]
    assert np.abs(unscaled / unscaled[0, 0] - plain / plain[0, 0]).max() < 1e-3


def test_pre_norm_server_computes_the_normed_rows_itself(serving):
    """And in pre-norm models it does not even need that: its own first norm drops the scaling."""
    served = serving("llama")
    values = served.values(batch=1)
    caught: list[torch.Tensor] = []
    handle = served.server.model.layers[0].input_layernorm.register_forward_hook(
        lambda _m, _i, out: caught.append(out.clone())
    )
    served.wired.forward(values)
    served.wired.forward(values)
    handle.remove()
    plain = torch.from_numpy(served.expected_rows(values)).float()
    normed = served.server.model.layers[0].input_layernorm(plain).detach()
    for seen in caught:
        assert (seen - normed).abs().max() < 1e-2 * normed.abs().max()
    # The row sums of the enclave's answer are alpha itself, up to the norm's eps.
    weights: list[np.ndarray] = []
    ask = served.enclave.softmax
    served.enclave.softmax = lambda scores, session, scale: (
        weights.append(ask(scores, session, scale).copy()),
        weights[-1],
    )[1]
    opened, held = served.wired.open, {}
    served.wired.open = lambda *given: (opened(*given), held.update(rows=served.wired._rows[0].double().numpy()))[0]
    served.wired.forward(values)
    alpha = held["rows"][:, 0] / plain[0, :, 0].double().numpy()
    assert np.abs(weights[0][0].sum(-1) / alpha - 1).max() < 2e-2
