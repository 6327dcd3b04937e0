//! `nodedock get resources`, and resources in the tables of others.

use std::collections::BTreeMap;

use anyhow::Result;
use nodedock_proto::node::v1;
use serde::Serialize;

use super::super::Place;
use super::super::client::{Client, said};
use super::super::output::{Rows, print};
use super::super::pods::ResourceOutcome;
use super::GetArgs;

#[derive(Debug, PartialEq, Serialize)]
struct Resource {
    name: String,
    capacity: u32,
    allocatable: u32,
    allocated: u32,
    active: bool,
    driver: String,
    /// In tables only.
    #[serde(skip)]
    numa_nodes: Vec<u32>,
}

/// Prints the resources; one that went since the daemon's start is there with nothing, as on a node.
pub(super) async fn show(client: &mut Client, place: &Place, args: &GetArgs) -> Result<bool> {
    let answer = client.get_capacity(v1::GetCapacityRequest {}).await.map_err(said(place))?.into_inner();
    let named = |resource: &Resource| args.name.as_ref().is_none_or(|name| resource.name == *name);
    let resources: Vec<_> = all(answer).into_iter().filter(named).collect();
    print(args.output, &resources, || rows(&resources), "no extended resources")?;
    Ok(!resources.is_empty())
}

fn all(answer: v1::GetCapacityResponse) -> Vec<Resource> {
    let removed = answer.removed.into_iter().map(|name| v1::Resource { name, ..v1::Resource::default() });
    let mut resources: Vec<_> = answer.resources.into_iter().chain(removed).map(resource).collect();
    resources.sort_by(|a, b| a.name.cmp(&b.name));
    resources
}

fn resource(resource: v1::Resource) -> Resource {
    Resource {
        name: resource.name,
        capacity: resource.capacity,
        allocatable: resource.allocatable,
        allocated: resource.allocated,
        active: resource.active,
        driver: resource.driver,
        numa_nodes: resource.numa_nodes,
    }
}

fn rows(resources: &[Resource]) -> Rows {
    let row = |resource: &Resource| {
        let nodes: Vec<_> = resource.numa_nodes.iter().map(ToString::to_string).collect();
        vec![
            resource.name.clone(),
            resource.capacity.to_string(),
            resource.allocatable.to_string(),
            resource.allocated.to_string(),
            resource.active.to_string(),
            if resource.driver.is_empty() { "-".to_owned() } else { resource.driver.clone() },
            nodes.join(","),
        ]
    };
    Rows {
        heading: vec!["NAME", "CAPACITY", "ALLOCATABLE", "ALLOCATED", "ACTIVE", "DRIVER", "NUMA"],
        wide_from: 6,
        rows: resources.iter().map(row).collect(),
    }
}

/// How many devices of each resource a pod has.
pub(super) fn summary(resources: &[ResourceOutcome]) -> String {
    let mut devices: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for resource in resources {
        devices.entry(&resource.resource).or_default().extend(resource.devices.iter().map(String::as_str));
    }
    let count = |(name, mut devices): (&str, Vec<&str>)| {
        // Containers of a pod may use one after the other.
        devices.sort_unstable();
        devices.dedup();
        format!("{name}={}", devices.len())
    };
    devices.into_iter().map(count).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_resource_that_went_stands_among_the_others_with_nothing() {
        let there = v1::Resource {
            name: "b.dev/b".to_owned(),
            capacity: 3,
            allocatable: 2,
            allocated: 1,
            active: true,
            driver: "d".to_owned(),
            numa_nodes: vec![0, 1],
        };
        let answer = v1::GetCapacityResponse { resources: vec![there], removed: vec!["a.dev/a".to_owned()] };
        let resources = all(answer);
        let json = serde_json::to_value(&resources).unwrap();
        let expected = serde_json::json!([
            {"name": "a.dev/a", "capacity": 0, "allocatable": 0, "allocated": 0, "active": false, "driver": ""},
            {"name": "b.dev/b", "capacity": 3, "allocatable": 2, "allocated": 1, "active": true, "driver": "d"},
        ]);
        assert_eq!(json, expected);
        let rows = rows(&resources).rows;
        assert_eq!(rows[0], ["a.dev/a", "0", "0", "0", "false", "-", ""]);
        assert_eq!(rows[1], ["b.dev/b", "3", "2", "1", "true", "d", "0,1"]);
    }

    #[test]
    fn a_device_that_containers_use_in_turn_counts_once() {
        let of = |container: &str, devices: &[&str]| {
            ResourceOutcome::from(v1::ResourceOutcome {
                container: container.to_owned(),
                resource: "a.dev/a".to_owned(),
                device_ids: devices.iter().map(|id| (*id).to_owned()).collect(),
                ..v1::ResourceOutcome::default()
            })
        };
        assert_eq!(summary(&[of("init", &["0", "1"]), of("main", &["1"])]), "a.dev/a=2");
        assert_eq!(summary(&[]), "");
    }
}
