"""The gated delta rule and its gradient token by token, in NumPy and in the precision of its arguments, for tests."""

import numpy as np


def delta_rule_ref(tokens, cu_seqlens):
    """(out (N, HV, V), the states (B, HV, K, V) after each sequence's last token)."""
    q, k, v, beta, log_decay = tokens
    ratio = v.shape[1] // k.shape[1]
    out = np.zeros(v.shape, v.dtype)
    states = np.zeros((len(cu_seqlens) - 1, v.shape[1], k.shape[2], v.shape[2]), v.dtype)
    for b, (begin, end) in enumerate(zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True)):
        for t in range(begin, end):
            for h in range(v.shape[1]):
                key, state = k[t, h // ratio], states[b, h] * np.exp(log_decay[t, h])
                correction = beta[t, h] * (v[t, h] - key @ state)
                states[b, h] = state + np.outer(key, correction)
                out[t, h] = q[t, h // ratio] @ states[b, h]
    return out, states


def delta_rule_backward_ref(dout, tokens, cu_seqlens):
    """Tokens of gradients: of sum(out * dout), by the reverse of the recurrence."""
    q, k, v, beta, log_decay = tokens
    ratio = v.shape[1] // k.shape[1]
    gradients = type(tokens)(*(np.zeros_like(array) for array in tokens))
    for begin, end in zip(cu_seqlens[:-1], cu_seqlens[1:], strict=True):
        for h in range(v.shape[1]):
            states = [np.zeros((k.shape[2], v.shape[2]), v.dtype)]
            for t in range(begin, end):
                decayed, key = states[-1] * np.exp(log_decay[t, h]), k[t, h // ratio]
                states.append(decayed + np.outer(key, beta[t, h] * (v[t, h] - key @ decayed)))
            dstate = np.zeros_like(states[0])
            for t in range(end - 1, begin - 1, -1):
                key_head, decay, before = h // ratio, np.exp(log_decay[t, h]), states[t - begin]
                key = k[t, key_head]
                error = v[t, h] - key @ (before * decay)
                dstate += np.outer(q[t, key_head], dout[t, h])
                gradients.q[t, key_head] += states[t - begin + 1] @ dout[t, h]
                dcorrection = key @ dstate
                derror = beta[t, h] * dcorrection
                gradients.k[t, key_head] += dstate @ (beta[t, h] * error) - (before * decay) @ derror
                gradients.beta[t, h] = dcorrection @ error
                gradients.v[t, h] = derror
                dstate = dstate - np.outer(key, derror)
                gradients.log_decay[t, h] = decay * np.sum(dstate * before)
                dstate = dstate * decay
    return gradients
