"""Run a beam search through the engine."""

MAX_TOKENS = 12


def beams(engine, prompt, stops, **sampling):
    """The outputs of one request, and the tokens that came before the last step."""
    key = engine.submit(prompt, max_tokens=MAX_TOKENS, stop_token_ids=stops or [], **sampling)
    outputs, early, open_ones = {}, {}, sampling.get("n", 1)
    while open_ones:
        for delta in engine.steps.get(timeout=120).deltas:
            assert delta.key == key
            assert not delta.error, delta.error
            outputs.setdefault(delta.sample, []).extend(delta.token_ids)
            if delta.finish:
                open_ones -= 1
            else:
                early[delta.sample] = len(outputs[delta.sample])
    return [outputs[index] for index in sorted(outputs)], early
