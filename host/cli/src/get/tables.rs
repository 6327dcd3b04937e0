//! The columns of the tables that `nodedock get` prints.

use std::collections::{BTreeMap, BTreeSet};

use nodedock_proto::node::v1;
use serde_json::{Map, Value};

use super::super::describe;
use super::super::output::{Column, Row, joined};
use super::ClassOfResource;
use nodedock_base::clock::rfc3339;
use nodedock_kube::extended_resources::class_name;

impl Row for v1::Driver {
    const COLUMNS: &'static [Column<Self>] = &[
        ("NAME", |driver| or_dash(&driver.name)),
        ("KIND", |driver| driver.kind.clone()),
        ("VERSION", |driver| or_dash(&driver.version)),
        ("STATE", |driver| driver.state.clone()),
        ("DEVICES", |driver| driver.devices.to_string()),
        ("SOURCE", |driver| driver.source.clone()),
        ("REASON", |driver| driver.reason.clone()),
        ("DIGEST", |driver| or_dash(&driver.digest)),
        ("CONNECTION", |driver| {
            or_dash(
                driver
                    .native
                    .as_ref()
                    .map_or("", |native| &native.connection),
            )
        }),
        ("ENDPOINT", |driver| {
            or_dash(driver.native.as_ref().map_or("", |native| &native.endpoint))
        }),
    ];
    const NARROW: usize = 7;
}

impl Row for v1::Device {
    const COLUMNS: &'static [Column<Self>] = &[
        ("DRIVER", |device| device.driver.clone()),
        ("POOL", |device| device.pool.clone()),
        ("NAME", |device| device.name.clone()),
        ("HEALTH", |device| device.health.clone()),
        ("USED BY", |device| {
            let users: Vec<_> = device.claims.iter().chain(&device.pods).collect();
            match users.is_empty() {
                true => "free".to_owned(),
                false => joined(users.into_iter().map(describe::name)),
            }
        }),
        ("BECAUSE", |device| device.health_message.clone()),
        ("RESOURCE", |device| device.extended_resource.clone()),
        ("NUMA", |device| joined(&device.numa_nodes)),
        ("TAINTS", |device| {
            let more = Some(device.more_taint_rules).filter(|more| *more > 0);
            let more = more.map(|more| format!("and of {more} more rules"));
            joined(device.taints.iter().map(describe::taint).chain(more))
        }),
        ("CAPACITY", |device| {
            joined(
                device
                    .capacity
                    .iter()
                    .map(|(name, value)| format!("{name}={value}")),
            )
        }),
        ("ATTRIBUTES", |device| attributes(&device.attributes_json)),
        ("READINGS", |device| joined(describe::readings(device))),
    ];
    // With names of common lengths, 80 columns of a terminal.
    const NARROW: usize = 5;
}

impl Row for v1::ClaimStatus {
    const COLUMNS: &'static [Column<Self>] = &[
        ("NAMESPACE", |claim| {
            of_object(&claim.id, |id| &id.namespace)
        }),
        ("NAME", |claim| of_object(&claim.id, |id| &id.name)),
        ("STATE", |claim| {
            describe::claim_state(&claim.state, claim.stale_boot).to_owned()
        }),
        ("PODS", |claim| {
            let pods = claim.pods.iter().map(describe::name);
            joined(pods.chain(claim.kubelet.as_ref().map(describe::kubelet_consumers)))
        }),
        ("DEVICES", |claim| {
            joined(claim.drivers.iter().flat_map(|of| {
                of.devices
                    .iter()
                    .map(|device| {
                        let mark = if of.gone_devices.contains(device) {
                            " (gone)"
                        } else {
                            ""
                        };
                        format!("{}/{device}{mark}", of.driver)
                    })
                    .collect::<Vec<_>>()
            }))
        }),
        ("PROBLEM", |claim| {
            claim
                .problem
                .as_ref()
                .map(|problem| problem.message.clone())
                .unwrap_or_default()
        }),
        ("UID", |claim| of_object(&claim.id, |id| &id.uid)),
        ("CDI DEVICES", |claim| {
            joined(claim.drivers.iter().flat_map(|driver| &driver.cdi_devices))
        }),
    ];
    const NARROW: usize = 6;
}

impl Row for v1::EndedClaim {
    const COLUMNS: &'static [Column<Self>] = &[
        ("NAMESPACE", |claim| {
            of_object(&claim.id, |id| &id.namespace)
        }),
        ("NAME", |claim| of_object(&claim.id, |id| &id.name)),
        ("ENDED", |claim| rfc3339(claim.at_ms)),
        ("PODS", |claim| {
            joined(claim.pods.iter().map(describe::name))
        }),
        ("DEVICES", |claim| joined(&claim.devices)),
        ("UID", |claim| of_object(&claim.id, |id| &id.uid)),
    ];
    const NARROW: usize = 5;
}

impl Row for v1::PodStatus {
    const COLUMNS: &'static [Column<Self>] = &[
        ("NAMESPACE", |status| {
            of_object(&status.pod, |pod| &pod.namespace)
        }),
        ("NAME", |status| of_object(&status.pod, |pod| &pod.name)),
        ("STATE", |status| status.state.clone()),
        ("CLAIMS", |status| describe::names(&status.claims)),
        ("RESOURCES", |status| device_counts(&status.resources)),
        ("UID", |status| of_object(&status.pod, |pod| &pod.uid)),
        ("CDI DEVICES", |status| {
            joined(
                status
                    .containers
                    .iter()
                    .flat_map(|container| &container.cdi_devices),
            )
        }),
    ];
    const NARROW: usize = 6;
}

impl Row for v1::Resource {
    const COLUMNS: &'static [Column<Self>] = &[
        ("NAME", |resource| resource.name.clone()),
        ("CAPACITY", |resource| resource.capacity.to_string()),
        ("ALLOCATABLE", |resource| resource.allocatable.to_string()),
        ("ALLOCATED", |resource| resource.allocated.to_string()),
        ("ACTIVE", |resource| resource.active.to_string()),
        ("DRIVER", |resource| or_dash(&resource.driver)),
        ("OFFERED BY", |resource| or_dash(&resource.mechanism)),
        ("NUMA", |resource| joined(&resource.numa_nodes)),
        ("BECAUSE", |resource| resource.mechanism_reason.clone()),
    ];
    const NARROW: usize = 7;
}

impl Row for v1::Adapter {
    const COLUMNS: &'static [Column<Self>] = &[
        ("DRIVER", |adapter| adapter.driver.clone()),
        ("RESOURCE", |adapter| adapter.resource.clone()),
        ("POOL", |adapter| adapter.pool.clone()),
        ("STATE", |adapter| {
            match (adapter.removed, adapter.enabled) {
                (true, _) => "removed".to_owned(),
                (false, true) => "enabled".to_owned(),
                (false, false) => "disabled".to_owned(),
            }
        }),
        ("PLUGIN", |adapter| {
            if adapter.connected {
                "connected"
            } else {
                "gone"
            }
            .to_owned()
        }),
        ("DEVICES", |adapter| adapter.devices.to_string()),
        ("HELD", |adapter| adapter.held.len().to_string()),
        ("OFFERED BY", |adapter| or_dash(&adapter.mechanism)),
        ("REASON", |adapter| adapter.reason.clone()),
        ("SOURCE", |adapter| adapter.source.clone()),
    ];
    const NARROW: usize = 9;
}

impl Row for ClassOfResource {
    const COLUMNS: &'static [Column<Self>] = &[
        ("CLASS", |class| class_name(&class.resource)),
        ("RESOURCE", |class| class.resource.to_string()),
        ("DRIVER", |class| class.driver.to_string()),
        ("OFFERED BY", |class| or_dash(&class.mechanism)),
    ];
}

impl Row for v1::NodeStatus {
    const COLUMNS: &'static [Column<Self>] = &[
        ("NAME", |node| node.name.clone()),
        ("VERSION", |node| node.version.clone()),
        ("STARTED", |node| rfc3339(node.started_ms)),
        ("DRIVERS", |node| node.drivers_serving.to_string()),
        ("CLAIMS", |node| match node.claims.is_empty() {
            true => "0".to_owned(),
            false => joined(
                node.claims
                    .iter()
                    .map(|(state, count)| format!("{count} {state}")),
            ),
        }),
        ("PODS", |node| node.pods.to_string()),
        ("UNHEALTHY", |node| node.devices_unhealthy.to_string()),
        ("PROBLEMS", |node| node.conditions.len().to_string()),
        ("BOOT ID", |node| node.boot_id.clone()),
        ("HARDWARE", |node| {
            if node.recorded_hardware {
                "recorded"
            } else {
                "own"
            }
            .to_owned()
        }),
    ];
    const NARROW: usize = 8;
}

impl Row for v1::Condition {
    const COLUMNS: &'static [Column<Self>] = &[
        ("SINCE", |condition| rfc3339(condition.since_ms)),
        ("CODE", |condition| {
            condition.problem.clone().unwrap_or_default().code
        }),
        ("SUBJECT", |condition| condition.subject.clone()),
        ("PROBLEM", |condition| {
            condition.problem.clone().unwrap_or_default().message
        }),
    ];
}

pub(super) fn or_dash(text: &str) -> String {
    if text.is_empty() {
        "-".to_owned()
    } else {
        text.to_owned()
    }
}

fn of_object(object: &Option<v1::ObjectRef>, part: fn(&v1::ObjectRef) -> &String) -> String {
    object.as_ref().map(part).cloned().unwrap_or_default()
}

fn attributes(json: &str) -> String {
    let attributes: Map<String, Value> = serde_json::from_str(json).unwrap_or_default();
    joined(
        attributes
            .iter()
            .map(|(name, value)| format!("{name}={}", json_text(value))),
    )
}

fn json_text(value: &Value) -> String {
    value
        .as_str()
        .map_or_else(|| value.to_string(), str::to_owned)
}

/// Returns the number of devices of each resource that a pod has; one that several containers use in turn counts once.
fn device_counts(resources: &[v1::ResourceOutcome]) -> String {
    let mut devices: BTreeMap<&str, BTreeSet<&str>> = BTreeMap::new();
    for resource in resources {
        let ids = resource.device_ids.iter().map(String::as_str);
        devices.entry(&resource.resource).or_default().extend(ids);
    }
    joined(
        devices
            .into_iter()
            .map(|(name, devices)| format!("{name}={}", devices.len())),
    )
}

#[cfg(test)]
mod tests {
    use super::super::super::output::{Format, table};
    use super::*;

    #[test]
    fn devices_fit_a_terminal() {
        let device = |name: &str, claims: Vec<v1::ObjectRef>| v1::Device {
            driver: "mock-gpu.nodedock.dev".to_owned(),
            pool: "node-1/gpus".to_owned(),
            name: name.to_owned(),
            health: "unhealthy".to_owned(),
            health_message: "the memory has too many errors to be used by a program".to_owned(),
            claims,
            ..v1::Device::default()
        };
        let claim = v1::ObjectRef {
            namespace: "default".to_owned(),
            name: "train".to_owned(),
            uid: "u".to_owned(),
        };
        let devices = [device("gpu-0", vec![claim]), device("gpu-1", Vec::new())];
        let text = table(Format::Table, &devices, "no devices");
        let lines: Vec<_> = text.lines().collect();
        assert!(lines.iter().all(|line| line.len() <= 80), "{text}");
        assert!(lines[1].ends_with("default/train"), "{text}");
        assert!(lines[2].ends_with("free"), "{text}");
        assert!(table(Format::Wide, &devices, "no devices").contains("too many errors"));
    }

    #[test]
    fn device_used_in_turn_counts_once() {
        let of = |container: &str, devices: &[&str]| v1::ResourceOutcome {
            container: container.to_owned(),
            resource: "a.dev/a".to_owned(),
            device_ids: devices.iter().map(|id| (*id).to_owned()).collect(),
            ..v1::ResourceOutcome::default()
        };
        assert_eq!(
            device_counts(&[of("init", &["0", "1"]), of("main", &["1"])]),
            "a.dev/a=2"
        );
        assert_eq!(device_counts(&[]), "");
    }
}
