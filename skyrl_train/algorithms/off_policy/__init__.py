"""Off-policy corrections: weights and rejections for tokens that another policy sampled, and how far apart the two are.

    proximal (step, arrival, interpolated) ──┬──weights: one for each token──────────┐
    behaviour ───────────────────────────────┼──rejections: which tokens may train───┼──> the loss
                                             └──metrics: off_policy/*                ┘

``r = pi_prox / pi_behave`` per token: the policy as the step begins over the engine's distribution when it sampled. It
covers staleness and the numerical mismatch between engine and trainer alike.
"""
