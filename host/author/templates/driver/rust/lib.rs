//! Offers nodes below `/dev` as devices.

// @FACETS@
use nodedock_sdk::*;

struct NodeDriver;

nodedock_sdk::export_driver!(NodeDriver /* @TRAITS@ */);

const POOL: &str = "nodes";
const NODES: [&str; 2] = ["/dev/fuse", "/dev/net/tun"];

impl Driver for NodeDriver {
    fn describe() -> DriverInfo {
        DriverInfo::new("my-gpu.example.com", env!("CARGO_PKG_VERSION"))
            .summary("Nodes below /dev")
            .device_nodes(NODES)
            .env(["MY_GPU_*"])
            .events(["misc"])
    }

    fn discover(host: &Host, _: &Context, _: &Trigger) -> Result<Inventory, Problem> {
        let mut pool = Pool::new(POOL);
        for path in NODES {
            // A node that this machine does not have is not an error.
            for node in host.device_nodes().glob(path)? {
                let device = Device::new(name(path)).attribute("minor", node.minor);
                pool = pool.device(device.identity(format!("dev:{path}")));
            }
        }
        Ok(Inventory::new().pool(pool))
    }

    fn prepare(host: &Host, _: &Context, claim: &Claim) -> Result<Prepared, Problem> {
        Prepared::each(claim, |allocated| {
            let device = &allocated.device;
            let path = NODES.into_iter().find(|path| name(path) == *device);
            let path = path.ok_or_else(|| unknown(device))?;
            host.device_nodes().stat(path)?;
            let suffix = device.replace('-', "_").to_uppercase();
            let edits = ContainerEdits::new().device_node(path);
            Ok(edits.env(format!("MY_GPU_{suffix}"), path))
        })
    }
}

fn unknown(device: &str) -> Problem {
    Problem::not_found("no-such-device", format!("there is no device {device}"))
}

/// The name of a node's device: `net-tun` for `/dev/net/tun`.
fn name(path: &str) -> String {
    dns_label(path.trim_start_matches("/dev/"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use nodedock_sdk::testing::Harness;

    #[test]
    fn claim_gets_node_while_it_exists() {
        let node = Harness::<NodeDriver>::new();
        node.fake().character_node("/dev/fuse", 10, 229);
        assert_eq!(node.discover().unwrap().pools[0].devices.len(), 1);

        let fuse = Claim::new("default", "demo", "uid-1").device("request", POOL, "fuse");
        let prepared = node.prepare(&fuse).unwrap();
        assert_eq!(prepared.devices[0].edits.device_nodes[0].path, "/dev/fuse");

        node.fake().remove("/dev/fuse");
        assert_eq!(node.prepare(&fuse).unwrap_err().kind, ProblemKind::NotFound);
    }
}
