//! What several resources say of one container, as one. Pure.

use std::collections::BTreeMap;

use nodedock_model::{ContainerAllocation, ExtendedResource, PodAllocation};

/// One container's devices of all resources.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Merged {
    pub allocation: ContainerAllocation,
    /// What was left out because something else stands in its place, one sentence each.
    pub conflicts: Vec<String>,
}

/// Merges in the order of the resources' names: where two say something else of the same thing, the first is right.
pub fn merge(parts: &BTreeMap<ExtendedResource, ContainerAllocation>) -> Merged {
    let mut merged = Merged::default();
    for (resource, part) in parts {
        merged.add(resource, part);
    }
    merged
}

/// What a container was given by plugins.
pub fn container(allocation: &PodAllocation, container: &str) -> Merged {
    let entries = allocation.entries.iter().filter(|entry| entry.container == container);
    let parts = entries.filter_map(|entry| Some((entry.resource.clone(), entry.response.clone()?)));
    merge(&parts.collect())
}

impl Merged {
    fn add(&mut self, resource: &ExtendedResource, part: &ContainerAllocation) {
        let Self { allocation, conflicts } = self;
        for (name, value) in &part.env {
            put(&mut allocation.env, name, value, || {
                conflicts.push(format!("{resource}: the variable {name} is set already"))
            });
        }
        for (key, value) in &part.annotations {
            put(&mut allocation.annotations, key, value, || {
                conflicts.push(format!("{resource}: the annotation {key} is set already"))
            });
        }
        for mount in &part.mounts {
            let path = &mount.container_path;
            let known = allocation.mounts.iter().find(|known| known.container_path == *path);
            match known {
                Some(known) if known == mount => {}
                Some(known) => {
                    conflicts.push(format!("{resource}: {} is mounted at {path} already", known.host_path))
                }
                None => allocation.mounts.push(mount.clone()),
            }
        }
        for node in &part.device_nodes {
            let path = &node.container_path;
            let known = allocation.device_nodes.iter().find(|known| known.container_path == *path);
            match known {
                Some(known) if known == node => {}
                Some(known) => conflicts.push(format!(
                    "{resource}: the device {path} is {} ({}) already",
                    known.host_path, known.permissions
                )),
                None => allocation.device_nodes.push(node.clone()),
            }
        }
        for name in &part.cdi_devices {
            if !allocation.cdi_devices.contains(name) {
                allocation.cdi_devices.push(name.clone());
            }
        }
    }
}

fn put(map: &mut BTreeMap<String, String>, key: &str, value: &str, conflict: impl FnOnce()) {
    match map.get(key) {
        None => drop(map.insert(key.to_owned(), value.to_owned())),
        Some(known) if known == value => {}
        Some(_) => conflict(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::devices::fixtures::{ids, resource};
    use nodedock_model::{AllocationMount, AllocationNode};

    fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
    }

    fn mount(host: &str, container: &str, read_only: bool) -> AllocationMount {
        AllocationMount { host_path: host.to_owned(), container_path: container.to_owned(), read_only }
    }

    fn node(host: &str, container: &str) -> AllocationNode {
        AllocationNode {
            host_path: host.to_owned(),
            container_path: container.to_owned(),
            permissions: "rw".to_owned(),
        }
    }

    fn merged(parts: &[(&str, ContainerAllocation)]) -> Merged {
        merge(&parts.iter().map(|(short, part)| (resource(short), part.clone())).collect())
    }

    #[test]
    fn nothing_merges_to_nothing() {
        assert_eq!(merged(&[]), Merged::default());
        assert_eq!(merged(&[("a", ContainerAllocation::default())]), Merged::default());
    }

    #[test]
    fn what_several_resources_say_is_put_together_and_cdi_names_are_there_once() {
        let a = ContainerAllocation {
            env: map(&[("A", "1")]),
            annotations: map(&[("a", "1")]),
            mounts: vec![mount("/a", "/a", true)],
            device_nodes: vec![node("/dev/a", "/dev/a")],
            cdi_devices: ids(&["v/c=0", "v/c=1", "v/c=0"]),
        };
        let b = ContainerAllocation {
            env: map(&[("B", "2"), ("A", "1")]),
            mounts: vec![mount("/b", "/b", false), mount("/a", "/a", true)],
            device_nodes: vec![node("/dev/b", "/dev/b"), node("/dev/a", "/dev/a")],
            cdi_devices: ids(&["v/c=1", "v/c=2"]),
            ..ContainerAllocation::default()
        };
        let Merged { allocation, conflicts } = merged(&[("a", a), ("b", b)]);
        assert!(conflicts.is_empty(), "the same said twice is no conflict: {conflicts:?}");
        assert_eq!(allocation.env, map(&[("A", "1"), ("B", "2")]));
        assert_eq!(
            (allocation.mounts.len(), allocation.device_nodes.len(), allocation.annotations.len()),
            (2, 2, 1)
        );
        assert_eq!(allocation.cdi_devices, ids(&["v/c=0", "v/c=1", "v/c=2"]));
    }

    #[test]
    fn the_first_resource_by_name_is_right_and_each_conflict_is_said() {
        let of = |text: &str| ContainerAllocation {
            env: map(&[("E", text)]),
            annotations: map(&[("n", text)]),
            mounts: vec![mount(&format!("/{text}"), "/m", true)],
            device_nodes: vec![node(&format!("/dev/{text}"), "/dev/d")],
            ..ContainerAllocation::default()
        };
        let Merged { allocation, conflicts } = merged(&[("b", of("late")), ("a", of("first"))]);
        assert_eq!(allocation, of("first"));
        assert_eq!(conflicts.len(), 4, "{conflicts:?}");
        assert!(conflicts.iter().all(|words| words.starts_with("example.com/b: ")), "{conflicts:?}");
        assert!(conflicts.iter().any(|words| words.contains("/dev/first (rw)")), "{conflicts:?}");
    }
}
