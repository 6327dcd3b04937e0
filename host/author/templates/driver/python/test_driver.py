"""Unit tests, with a fake host and without WebAssembly: `.venv/bin/python3 -m unittest`."""

import unittest

from nodedock import testing

testing.bindings("wit")

import driver  # noqa: E402 (needs the bindings)


class Nodes(unittest.TestCase):
    def test_claim_gets_node_while_it_exists(self):
        host = testing.FakeHost().node("/dev/fuse", 10, 229)
        with host:
            pool = driver.Discovery().discover(host.context(), None).pools[0]
            self.assertEqual([device.name for device in pool.devices], ["fuse"])

            claim = host.claim("uid-1", (driver.POOL, "fuse"))
            prepared = driver.Preparation().prepare(host.context(), [claim])[0].outcome.value
            self.assertEqual(prepared.devices[0].edits.device_nodes[0].path, "/dev/fuse")

            host.remove("/dev/fuse")
            refused = driver.Preparation().prepare(host.context(), [claim])[0].outcome.value
            self.assertEqual(refused.code, "no-such-node")


if __name__ == "__main__":
    unittest.main()
