"""Worker processes for environments that block: the controller's end (``pool``), the process that forks them
(``nursery``), and what runs in each (``worker``)."""
