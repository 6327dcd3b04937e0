//! The paths in a device plugin's answer, as container runtimes read them for a kubelet: a link is what it leads to, and a directory is all
//! device nodes below it (`oci.WithDevices` of containerd, `specAddDevices` of CRI-O).
//!
//! Is given an answer and the node. Returns the device nodes with their types and numbers, or refuses the answer. Blocks: a path may be on
//! a file system that hangs.

use std::fs::DirEntry;
use std::io::{self, ErrorKind};

use crate::hardware::{Hardware, NodeNumbers, leads_nowhere};
use nodedock_model::limit::{ALLOCATION_ENTRIES_MAX, PATH_BYTES_MAX};
use nodedock_model::{
    AllocationNode, ContainerAllocation, DeviceNode, ExtendedResource, NodeKind, Problem,
    ProblemCode,
};

/// Entries of directories that are read for one answer: `/dev` of a large node has some thousands.
const DIRECTORY_ENTRIES_MAX: usize = 16 << 10;

/// Directories that no runtime expands, and entries that it does not pass on (`getDevices` of containerd).
const SKIPPED_DIRECTORIES: [&str; 7] =
    ["pts", "shm", "fd", "mqueue", ".lxc", ".lxd-mounts", ".udev"];
const SKIPPED_NODE: &str = "console";

/// Returns the device nodes of an answer. Fails if a path of it leads nowhere, or to no device node where there must be one.
pub(crate) fn device_nodes(
    resource: &ExtendedResource,
    allocation: &ContainerAllocation,
    hardware: &Hardware,
) -> Result<Vec<DeviceNode>, Problem> {
    for mount in &allocation.mounts {
        // The runtime mounts what a link leads to when the container starts.
        hardware
            .resolve(&mount.host_path)
            .map_err(|error| unreadable(resource, "mounts", &mount.host_path, &error))?;
    }
    let mut found = Found {
        resource,
        hardware,
        nodes: Vec::new(),
        entries: 0,
    };
    allocation
        .device_nodes
        .iter()
        .try_for_each(|node| found.add(node))?;
    Ok(found.nodes)
}

/// The nodes of an answer so far.
struct Found<'a> {
    resource: &'a ExtendedResource,
    hardware: &'a Hardware,
    nodes: Vec<DeviceNode>,
    /// Entries of directories that were read.
    entries: usize,
}

impl Found<'_> {
    fn add(&mut self, node: &AllocationNode) -> Result<(), Problem> {
        let unreadable = |error| unreadable(self.resource, "devices", &node.host_path, &error);
        let path = self.hardware.resolve(&node.host_path).map_err(unreadable)?;
        match self.hardware.node(&path).map_err(unreadable)? {
            Some(numbers) => self.push(node, path, node.container_path.clone(), numbers),
            None if is_directory(self.hardware, &path).map_err(unreadable)? => {
                self.expand(node, &path)
            }
            None => {
                let leads = if path == node.host_path {
                    String::new()
                } else {
                    format!(", a link to {path}")
                };
                Err(self.invalid(&format!("{}{leads}, which is no device node", named(node))))
            }
        }
    }

    fn expand(&mut self, node: &AllocationNode, path: &str) -> Result<(), Problem> {
        let mut has_nodes = false;
        let mut directories = vec![(path.to_owned(), node.container_path.clone())];
        while let Some((here, inside)) = directories.pop() {
            for entry in self.entries(&here)? {
                let entry_path = || {
                    format!(
                        "{}/{}",
                        here.trim_end_matches('/'),
                        entry.file_name().display()
                    )
                };
                let unreadable =
                    |error| unreadable(self.resource, "devices", &entry_path(), &error);
                let kind = match entry.file_type() {
                    // It was removed while the directory was read.
                    Err(error) if error.kind() == ErrorKind::NotFound => continue,
                    kind => kind.map_err(unreadable)?,
                };
                let Ok(name) = entry.file_name().into_string() else {
                    return Err(self.invalid(&format!(
                        "{}: the name {} is not UTF-8",
                        named(node),
                        entry_path()
                    )));
                };
                let (host, inside) = (
                    entry_path(),
                    format!("{}/{name}", inside.trim_end_matches('/')),
                );
                if kind.is_dir() && !SKIPPED_DIRECTORIES.contains(&name.as_str()) {
                    directories.push((host, inside));
                } else if !kind.is_dir() && name != SKIPPED_NODE {
                    match self.hardware.node(&host) {
                        Err(error) if error.kind() == ErrorKind::NotFound => {}
                        Err(error) => return Err(unreadable(error)),
                        // Links and all else that is no device.
                        Ok(
                            None
                            | Some(NodeNumbers {
                                kind: NodeKind::Fifo,
                                ..
                            }),
                        ) => {}
                        Ok(Some(numbers)) => {
                            has_nodes = true;
                            self.push(node, host, inside, numbers)?;
                        }
                    }
                }
            }
        }
        if !has_nodes {
            let message = format!(
                "{}, a directory with no device node; links in it do not count",
                named(node)
            );
            return Err(self.invalid(&message));
        }
        Ok(())
    }

    /// The entries of a directory by name, so that the same nodes are in the same order each time.
    fn entries(&mut self, path: &str) -> Result<Vec<DirEntry>, Problem> {
        let unreadable = |error| unreadable(self.resource, "devices", path, &error);
        let mut entries = Vec::new();
        for entry in std::fs::read_dir(self.hardware.path(path)).map_err(unreadable)? {
            self.entries += 1;
            if self.entries > DIRECTORY_ENTRIES_MAX {
                let message = format!(
                    "directories with more than {DIRECTORY_ENTRIES_MAX} entries (at {path})"
                );
                return Err(self.invalid(&message));
            }
            entries.push(entry.map_err(unreadable)?);
        }
        entries.sort_by_key(DirEntry::file_name);
        Ok(entries)
    }

    /// Adds a node. One that the answer has already gets the permissions of both.
    fn push(
        &mut self,
        node: &AllocationNode,
        host_path: String,
        path: String,
        numbers: NodeNumbers,
    ) -> Result<(), Problem> {
        if path.len() > PATH_BYTES_MAX {
            let message = format!(
                "{}, whose node {host_path} has a path of more than {PATH_BYTES_MAX} bytes in the container",
                named(node)
            );
            return Err(self.invalid(&message));
        }
        if let Some(known) = self.nodes.iter_mut().find(|known| known.path == path) {
            if (known.kind, known.major, known.minor)
                != (Some(numbers.kind), Some(numbers.major), Some(numbers.minor))
            {
                let message = format!(
                    "two device nodes for {path}: {} and {host_path}",
                    known.node_path()
                );
                return Err(self.invalid(&message));
            }
            let more = node
                .permissions
                .chars()
                .filter(|letter| !known.permissions.contains(*letter));
            let more: String = more.collect();
            known.permissions.push_str(&more);
            return Ok(());
        }
        if self.nodes.len() == ALLOCATION_ENTRIES_MAX {
            let message =
                format!("more than {ALLOCATION_ENTRIES_MAX} device nodes, directories expanded");
            return Err(self.invalid(&message));
        }
        self.nodes.push(DeviceNode {
            kind: Some(numbers.kind),
            major: Some(numbers.major),
            minor: Some(numbers.minor),
            host_path: (host_path != path).then_some(host_path),
            path,
            permissions: node.permissions.clone(),
            file_mode: None,
            uid: None,
            gid: None,
        });
        Ok(())
    }

    fn invalid(&self, what: &str) -> Problem {
        let message = format!("the answer of the plugin of {} names {what}", self.resource);
        Problem::invalid(ProblemCode::AllocationNodeInvalid, message).with("field", "devices")
    }
}

fn is_directory(hardware: &Hardware, path: &str) -> io::Result<bool> {
    Ok(std::fs::symlink_metadata(hardware.path(path))?.is_dir())
}

fn named(node: &AllocationNode) -> String {
    format!("{} (host_path of devices)", node.host_path)
}

fn unreadable(resource: &ExtendedResource, field: &str, path: &str, error: &io::Error) -> Problem {
    let message = format!(
        "the answer of the plugin of {resource} names {path} (host_path of {field}): {error}"
    );
    let problem = match leads_nowhere(error) {
        true => Problem::invalid(ProblemCode::AllocationPathMissing, message),
        false => Problem::unavailable(ProblemCode::IoError, message),
    };
    problem.with("field", field)
}

#[cfg(test)]
#[path = "plugin_paths_tests.rs"]
mod tests;
