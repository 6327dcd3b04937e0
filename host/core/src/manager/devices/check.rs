//! Checks a plugin's answer against the node: the paths that it names must exist.

use std::path::Path;

use nodedock_model::{ContainerAllocation, ExtendedResource, Problem, ProblemCode};

/// Fails if a path of an answer does not exist below `root`. Blocks: a path may be on a file system that hangs.
pub(crate) fn paths_exist(
    resource: &ExtendedResource,
    allocation: &ContainerAllocation,
    root: &Path,
) -> Result<(), Problem> {
    let mounts = allocation.mounts.iter().map(|mount| ("mounts", &mount.host_path));
    let nodes = allocation.device_nodes.iter().map(|node| ("devices", &node.host_path));
    for (field, path) in mounts.chain(nodes) {
        let here = root.join(path.trim_start_matches('/'));
        if let Err(error) = here.metadata() {
            let message = format!(
                "the answer of the plugin of {resource} names {path} (host_path of {field}): {error}"
            );
            return Err(Problem::invalid(ProblemCode::AllocationPathMissing, message).with("field", field));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manager::devices::fixtures::resource;
    use nodedock_model::{AllocationMount, AllocationNode};

    #[test]
    fn paths_that_are_not_there_are_refused_by_field() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("dev")).unwrap();
        std::fs::write(root.path().join("dev/gpu0"), "").unwrap();
        let node = |path: &str| AllocationNode {
            host_path: path.to_owned(),
            container_path: path.to_owned(),
            permissions: "rw".to_owned(),
        };
        let mount = |path: &str| AllocationMount {
            host_path: path.to_owned(),
            container_path: "/x".to_owned(),
            read_only: true,
        };
        let good = ContainerAllocation {
            mounts: vec![mount("/dev")],
            device_nodes: vec![node("/dev/gpu0")],
            ..ContainerAllocation::default()
        };
        assert_eq!(paths_exist(&resource("gpu"), &good, root.path()), Ok(()));
        for (bad, field) in [
            (ContainerAllocation { mounts: vec![mount("/lib/none")], ..good.clone() }, "mounts"),
            (ContainerAllocation { device_nodes: vec![node("/dev/gpu1")], ..good.clone() }, "devices"),
        ] {
            let problem = paths_exist(&resource("gpu"), &bad, root.path()).unwrap_err();
            assert!(problem.message.contains("example.com/gpu"), "{problem}");
            assert!(problem.message.contains(field) && problem.message.contains("No such file"), "{problem}");
        }
    }
}
