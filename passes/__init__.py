"""The compiler: one pass a file, the file named as its function; ``pipeline`` only orders them.

    Dynamo graph --capture-->        functional ATen graph, global shapes
                 --replace_random--> the same, draws as ordered nodes
                 --plan-->           the same, a layout on every node (``fxshard.values``)
                 --rewrite-->        one rank's local graph with communication nodes
                 --hoist_sums-->     the same, gradients summed at the parameters
                 --wrap_..., bucket_gradients-->  custom backwards, checkpoints and gradient buckets as submodules
                 --lower-->          those nodes as functional collectives in the inner backend

A pass is ``(gm, *, config) -> gm``, does one thing, is idempotent, a no-op without a match, and keeps
``node.meta``.  The runner (``pipeline``) lints, recompiles and names the pass in a failure.
"""
