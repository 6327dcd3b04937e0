"""Unit tests of the helpers, with the fake host."""

import os
import sys
import unittest

HERE = os.path.dirname(os.path.abspath(__file__))
sys.path.insert(0, os.path.dirname(HERE))

from nodedock import testing  # noqa: E402 (the package comes from the directory beside)

testing.bindings(os.path.join(HERE, "../../../wit"), "full-driver")

from nodedock import sdk  # noqa: E402 (needs the bindings)
from componentize_py_types import Err, Ok  # noqa: E402
from wit_world.imports import log, sysfs, sysfs_write  # noqa: E402
from wit_world.imports.inventory import AttributeValue_Ints, AttributeValue_Version  # noqa: E402


def gpu():
    host = testing.FakeHost()
    host.file("devices/pci0000:00/0000:00:02.0/vendor", "0x10de\n")
    host.file("devices/pci0000:00/0000:00:02.0/numa_node", "1\n")
    host.link("bus/pci/devices/0000:00:02.0", "../../../devices/pci0000:00/0000:00:02.0")
    return host


class Reads(unittest.TestCase):
    def test_device_directory_is_found_by_link(self):
        with gpu():
            directories = sdk.devices("bus/pci/devices/*")
            self.assertEqual(directories, ["devices/pci0000:00/0000:00:02.0"])
            self.assertEqual(sdk.find_parsed(f"{directories[0]}/numa_node"), 1)
            self.assertEqual(sdk.find_parsed(f"{directories[0]}/vendor", sdk.hexadecimal), 0x10DE)
            self.assertEqual(sdk.find("bus/pci/devices/0000:00:02.0/vendor"), "0x10de")
            self.assertIsNone(sdk.find_parsed(f"{directories[0]}/vendor"))
            self.assertEqual(sdk.devices("class/net/*"), [])

    def test_absence_is_none_and_failure_raises(self):
        with gpu().fail("class/x", "no-value").fail("class/y"):
            self.assertIsNone(sdk.find("class/z"))
            self.assertIsNone(sdk.find("class/x"))
            self.assertIsNone(sdk.find_link("devices/pci0000:00"))
            self.assertIsNone(sdk.find_link("class/z"))
            for read in (sdk.find, sdk.find_link, sdk.find_parsed):
                with self.assertRaises(Err) as raised:
                    read("class/y")
                self.assertEqual(raised.exception.value.code, "io-error")


class Values(unittest.TestCase):
    def test_attributes_have_types_of_values(self):
        device = sdk.device("a", {"n": 1, "b": True, "t": "x", "l": [1, 2], "v": AttributeValue_Version("1.0.0")})
        kinds = [type(attribute.value).__name__ for attribute in device.attributes]
        self.assertEqual(kinds, [f"AttributeValue_{kind}" for kind in ("Int", "Boolean", "Text", "Ints", "Version")])
        self.assertEqual(device.attributes[3].value, AttributeValue_Ints([1, 2]))
        for bad in (1.5, [], [1, "x"], None):
            with self.assertRaisesRegex(TypeError, "attribute n has the value"):
                sdk.device("a", {"n": bad})

    def test_edits_take_paths_and_parts(self):
        edits = sdk.edits({"A": "1"}, ["/dev/a", sdk.device_node("/dev/b", host_path="/dev/c")], ["/opt/x"])
        self.assertEqual([(node.path, node.host_path) for node in edits.device_nodes], [("/dev/a", None), ("/dev/b", "/dev/c")])
        self.assertEqual((edits.env[0].key, edits.mounts[0].container_path), ("A", "/opt/x"))
        self.assertEqual(edits.hooks, [])

    def test_info_refuses_unknown_requests(self):
        info = sdk.driver_info("a.example.com", "0.1.0", device_nodes=["/dev/a"], memory_mib=128)
        self.assertEqual((info.capabilities.device_nodes, info.capabilities.env), (["/dev/a"], []))
        self.assertEqual((info.limits.memory_mib, info.limits.wall_ms), (128, None))
        with self.assertRaisesRegex(TypeError, "device_node"):
            sdk.driver_info("a.example.com", "0.1.0", device_node=["/dev/a"])

    def test_outcome_has_its_claims_problem(self):
        def refuse(_):
            raise sdk.invalid("bad", "no")

        self.assertEqual(sdk.outcome(refuse, 1).value.code, "bad")
        self.assertEqual(sdk.outcome(str, 1), Ok("1"))
        with self.assertRaises(ZeroDivisionError):
            sdk.outcome(lambda: 1 // 0)

    def test_prepared_device_has_no_subrequest(self):
        claim = testing.FakeHost().claim("uid", ("nodes", "fuse"))
        claim.devices[0].request = "gpu/large"
        self.assertEqual(sdk.prepared(claim.devices[0], sdk.edits()).requests, ["gpu"])


class Host(unittest.TestCase):
    def test_log_and_writes_are_recorded(self):
        with gpu() as host:
            log.write(log.Level.INFO, "found", [])
            sysfs_write.write("bus/pci/devices/0000:00:02.0/numa_node", "0")
            self.assertEqual(sysfs.read("devices/pci0000:00/0000:00:02.0/numa_node"), "0")
            with self.assertRaises(Err):
                sysfs_write.write("class/none", "0")
        self.assertEqual(host.lines, [("info", "found")])
        self.assertEqual(host.writes, [("bus/pci/devices/0000:00:02.0/numa_node", "0")])
        with self.assertRaises(NotImplementedError):
            sysfs.read("class/x")

    def test_globs_keep_to_segments(self):
        self.assertTrue(testing.matches(["class", "*"], ["class", "net"]))
        self.assertFalse(testing.matches(["class", "*"], ["class", "net", "eth0"]))
        self.assertTrue(testing.matches(["**", "eth0"], ["class", "net", "eth0"]))


if __name__ == "__main__":
    unittest.main()
