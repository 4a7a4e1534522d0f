"""Virtual time: the real trainers and rules on modelled engines and modelled training.

    lengths ──> ModelledGenerator ──> real client ──> ModelledEngine (slots, decode speed, pauses)
                                                          │ versions, token by token
    real trainer, staleness manager, workers, buffer, ledger, minibatch ──> ModelledBackend (takes modelled seconds)

In ``learning`` the engine samples and the backend trains for real, and only their seconds are modelled.
Nothing waits in real time: the event loop's clock jumps to the next timer when nothing is ready.
"""
