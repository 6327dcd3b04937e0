//! Data that a runtime needs to start a pod's containers. Pure, and derived from records, so it is the same after a restart.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::cdi;
use nodedock_model::{
    ClaimRecord, ContainerAllocation, ContainerClaim, DeviceAccess, ExtendedResource, PodRecord,
    PreparedDevice,
};

/// Allocation of one container: from its own claims, then for its extended resources.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ContainerAnswer {
    pub name: String,
    pub allocation: ContainerAllocation,
    /// Parts that were left out because they contradict an earlier part, one sentence each.
    pub conflicts: Vec<String>,
}

/// The answer for each container of a pod's record. `claim` finds a claim's record by its UID.
pub(super) fn of_record(
    pod: &PodRecord,
    claim: impl Fn(&str) -> Option<Arc<ClaimRecord>>,
) -> Vec<ContainerAnswer> {
    let answers = pod.containers.iter().map(|container| {
        let mut answer = ContainerAnswer::named(&container.name);
        for used in &container.claims {
            let id = pod.claims.get(&used.pod_claim_name);
            if let Some(record) = id.and_then(|id| claim(id.uid.as_str())) {
                answer.add_claim(&record, used);
            }
        }
        answer
    });
    answers.collect()
}

impl ContainerAnswer {
    /// An answer with nothing in it.
    pub(crate) fn named(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            ..Self::default()
        }
    }

    /// Adds the devices of a claim that serve the container's request.
    fn add_claim(&mut self, record: &ClaimRecord, used: &ContainerClaim) {
        for (driver, part) in &record.drivers {
            let Some(prepared) = part.current() else {
                continue;
            };
            let serving = cdi::cdi_devices(record, driver)
                .into_iter()
                .filter(|(device, _)| serves(device, used));
            let serving: Vec<_> = serving.collect();
            if !serving.is_empty() {
                self.allocation
                    .annotations
                    .extend(prepared.annotations.clone());
            }
            for (device, names) in serving {
                if let (DeviceAccess::Plugin(answer), Some(of)) = (&device.access, &record.resource)
                {
                    self.add(&of.resource, &answer.allocation);
                }
                names
                    .into_iter()
                    .for_each(|name| push_once(&mut self.allocation.cdi_devices, name));
            }
        }
    }

    /// Adds what the plugin of a resource gave. Where two parts contradict each other, the earlier one counts.
    pub(crate) fn add(&mut self, resource: &ExtendedResource, part: &ContainerAllocation) {
        let Self {
            allocation,
            conflicts,
            ..
        } = self;
        let mut conflict = |what: String| conflicts.push(format!("{resource}: {what}"));
        for (name, _) in part
            .env
            .iter()
            .filter(|entry| !put(&mut allocation.env, *entry))
        {
            conflict(format!("the variable {name} is set already"));
        }
        for (key, _) in part
            .annotations
            .iter()
            .filter(|entry| !put(&mut allocation.annotations, *entry))
        {
            conflict(format!("the annotation {key} is set already"));
        }
        for mount in &part.mounts {
            let path = &mount.container_path;
            match allocation
                .mounts
                .iter()
                .find(|known| known.container_path == *path)
            {
                Some(known) if known == mount => {}
                Some(known) => {
                    conflict(format!("{} is mounted at {path} already", known.host_path))
                }
                None => allocation.mounts.push(mount.clone()),
            }
        }
        for node in &part.device_nodes {
            let path = &node.container_path;
            match allocation
                .device_nodes
                .iter()
                .find(|known| known.container_path == *path)
            {
                Some(known) if known == node => {}
                Some(known) => conflict(format!(
                    "the device {path} is {} ({}) already",
                    known.host_path, known.permissions
                )),
                None => allocation.device_nodes.push(node.clone()),
            }
        }
        part.cdi_devices
            .iter()
            .for_each(|name| push_once(&mut allocation.cdi_devices, name.clone()));
    }
}

/// Sets a key unless it is set. False: it has another value.
fn put(map: &mut BTreeMap<String, String>, (key, value): (&String, &String)) -> bool {
    map.entry(key.clone()).or_insert_with(|| value.clone()) == value
}

fn serves(device: &PreparedDevice, used: &ContainerClaim) -> bool {
    used.request
        .as_ref()
        .is_none_or(|request| device.requests.is_empty() || device.requests.contains(request))
}

fn push_once(names: &mut Vec<String>, name: String) {
    if !names.contains(&name) {
        names.push(name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::manager::devices::fixtures::{ids, resource};
    use nodedock_model::{AllocationMount, AllocationNode};

    fn map(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs
            .iter()
            .map(|(key, value)| ((*key).to_owned(), (*value).to_owned()))
            .collect()
    }

    fn mount(host: &str, container: &str, read_only: bool) -> AllocationMount {
        AllocationMount {
            host_path: host.to_owned(),
            container_path: container.to_owned(),
            read_only,
        }
    }

    fn node(host: &str, container: &str) -> AllocationNode {
        AllocationNode {
            host_path: host.to_owned(),
            container_path: container.to_owned(),
            permissions: "rw".to_owned(),
        }
    }

    /// The answer for a container that has only what plugins gave, in this order.
    fn merged(parts: &[(&str, ContainerAllocation)]) -> ContainerAnswer {
        let mut answer = ContainerAnswer::default();
        parts
            .iter()
            .for_each(|(short, part)| answer.add(&resource(short), part));
        answer
    }

    #[test]
    fn parts_are_merged_without_duplicates() {
        assert_eq!(
            merged(&[("a", ContainerAllocation::default())]),
            ContainerAnswer::default()
        );
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
        let ContainerAnswer {
            allocation,
            conflicts,
            ..
        } = merged(&[("a", a), ("b", b)]);
        assert!(
            conflicts.is_empty(),
            "the same value twice is no conflict: {conflicts:?}"
        );
        assert_eq!(allocation.env, map(&[("A", "1"), ("B", "2")]));
        assert_eq!(
            (
                allocation.mounts.len(),
                allocation.device_nodes.len(),
                allocation.annotations.len()
            ),
            (2, 2, 1)
        );
        assert_eq!(allocation.cdi_devices, ids(&["v/c=0", "v/c=1", "v/c=2"]));
    }

    #[test]
    fn first_part_wins_on_conflict() {
        let of = |text: &str| ContainerAllocation {
            env: map(&[("E", text)]),
            annotations: map(&[("n", text)]),
            mounts: vec![mount(&format!("/{text}"), "/m", true)],
            device_nodes: vec![node(&format!("/dev/{text}"), "/dev/d")],
            ..ContainerAllocation::default()
        };
        let ContainerAnswer {
            allocation,
            conflicts,
            ..
        } = merged(&[("a", of("first")), ("b", of("late"))]);
        assert_eq!(allocation, of("first"));
        assert_eq!(conflicts.len(), 4, "{conflicts:?}");
        assert!(
            conflicts
                .iter()
                .all(|conflict| conflict.starts_with("example.com/b: ")),
            "{conflicts:?}"
        );
        assert!(
            conflicts
                .iter()
                .any(|conflict| conflict.contains("/dev/first (rw)")),
            "{conflicts:?}"
        );
    }
}
