"""Objects that run elsewhere: in a thread, a child process or a Ray actor. One mechanism for all of them.

    driver                                                     host (thread, child process, Ray actor)
    WorkerConnection ──WorkerLink: batches of messages, in order──> Peer, or a blocking loop ──> the hosted object
       call / stream           <── Item*, then Result | Failure ──

| part | what it does |
|---|---|
| ``messages`` | ``Call``, ``Cancel``, ``Item``, ``Result``, ``Failure`` (an error as data), ``PeerState``, ``LastWords`` |
| ``connection`` | ``Peer`` calls the other end and serves its calls; the driver's ``WorkerConnection`` also starts and stops it |
| ``thread``, ``process``, ``ray`` | the links, and the one place where this package connects to Ray |
| ``host`` | the other end on an event loop; a blocking object in a thread or a child process has a ``Channel`` instead |
| ``executors`` | pools of workers that call a function, for stages |

| hosted object | where | driver's end |
|---|---|---|
| embedded engine: ``EngineLoop`` (blocking, polls between decode steps) | thread, process | ``EmbeddedEngine`` |
| any engine: ``EngineHost`` | process, Ray actor | ``ProcessEngine``, ``RayEngine`` |
| a run's generator: ``GeneratorHost``, which calls the driver's client | Ray actor | ``RolloutActor`` |
| a stage's function: ``WorkHost`` (blocking, in the main thread) | loop, thread, process, Ray actor | ``WorkerPool`` |
| training rank: ``TrainingWorker`` (blocking, all ranks called together) | Ray actor | ``WorkerGroup`` |
| a model that trains alone: ``LocalBackend``, ``LocalCritic`` (blocking) | process | ``ProcessBackend``, ``ProcessCritic`` |

Rules for failures, for all of them:
- An error of the hosted object fails its own call. A class of :mod:`skyrl_train.errors` arrives as itself, with the remote
  traceback as a note; any other arrives as an error of the caller's choice that names it.
- When the host dies, all pending calls fail at once with a typed error that says why, and so do later calls. Calls that the
  host had made to the driver are cancelled first.
- A cancelled call is cancelled in the hosted object. A blocking object cannot be cancelled, only killed.
- A child process ends when its parent does, also when the parent is killed; Ray ends its actors with their driver.

Training ranks and processes do not use a connection: their driver blocks, calls all ranks in one order, and ends all when one
dies (``docs/design/walks.md`` has the reasons).
"""
