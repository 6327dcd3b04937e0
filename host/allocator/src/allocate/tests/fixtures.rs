//! Nodes, claims and short forms of their allocations.

use std::sync::Arc;

use jiff::Timestamp;
use k8s_openapi::api::resource::v1::{AllocationResult, DeviceClass, ResourceClaim, ResourceSlice};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::super::{Bounds, InUse, Inventory, NodeRef, NotAllocated, allocate};

pub(super) const DRIVER: &str = "gpu.example.com";

pub(super) fn parsed<T: DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).expect("an object of the API")
}

/// A node with slices, classes and live claims.
pub(super) struct Machine {
    pub(super) slices: Vec<Value>,
    pub(super) classes: Vec<Value>,
    pub(super) in_use: InUse,
    pub(super) bounds: Bounds,
}

/// A slice of the pool `pool` with all of its devices, local to the node.
pub(super) fn slice(devices: &[Value]) -> Value {
    json!({"metadata": {"name": "slice-0"}, "spec": {
        "driver": DRIVER,
        "nodeName": "node-1",
        "pool": {"name": "pool", "generation": 1, "resourceSliceCount": 1},
        "devices": devices,
    }})
}

/// Replaces or adds a field, by its JSON pointer's last part in an object.
pub(super) fn with(mut object: Value, pointer: &str, value: Value) -> Value {
    let (parent, name) = pointer.rsplit_once('/').expect("a pointer");
    let parent = object.pointer_mut(parent).expect("a parent");
    parent[name] = value;
    object
}

pub(super) fn device(name: &str) -> Value {
    json!({"name": name, "attributes": {}})
}

/// Devices `gpu-0`, `gpu-1` and so on.
pub(super) fn devices(count: usize) -> Vec<Value> {
    (0..count)
        .map(|number| device(&format!("gpu-{number}")))
        .collect()
}

/// A claim with requests, constraints and configs, as the field `devices` of its spec has them.
pub(super) fn claim(devices: Value) -> Value {
    json!({"metadata": {"name": "claim"}, "spec": {"devices": devices}})
}

/// A request for one device of class `gpu`, with more fields.
pub(super) fn request(name: &str, fields: Value) -> Value {
    let mut exactly = json!({"deviceClassName": "gpu", "allocationMode": "ExactCount", "count": 1});
    for (field, value) in fields.as_object().expect("fields") {
        exactly[field] = value.clone();
    }
    json!({"name": name, "exactly": exactly})
}

pub(super) fn requests(requests: &[Value]) -> Value {
    claim(json!({"requests": requests}))
}

/// A claim of one request, `gpu`.
pub(super) fn one(fields: Value) -> Value {
    requests(&[request("gpu", fields)])
}

pub(super) fn selectors(expressions: &[&str]) -> Value {
    expressions
        .iter()
        .map(|expression| json!({"cel": {"expression": expression}}))
        .collect()
}

impl Machine {
    /// A machine with class `gpu`, which selects everything.
    pub(super) fn new(slices: &[Value]) -> Self {
        let class = json!({"metadata": {"name": "gpu"}, "spec": {}});
        let (in_use, bounds) = (InUse::default(), Bounds::default());
        Self {
            slices: slices.to_vec(),
            classes: vec![class],
            in_use,
            bounds,
        }
    }

    pub(super) fn of_devices(devices: &[Value]) -> Self {
        Self::new(&[slice(devices)])
    }

    pub(super) fn inventory(&self) -> Inventory {
        let labels = [("zone".to_owned(), "a".to_owned())].into();
        let node = NodeRef {
            name: "node-1".into(),
            labels,
        };
        Inventory::new(
            self.slices
                .iter()
                .map(|slice| Arc::new(parsed::<ResourceSlice>(slice.clone()))),
            &node,
        )
    }

    pub(super) fn allocate(&self, claim: &Value) -> Result<AllocationResult, NotAllocated> {
        let claim: ResourceClaim = parsed(claim.clone());
        let classes = |name: &str| {
            let class = self
                .classes
                .iter()
                .find(|class| class["metadata"]["name"] == name)?;
            Some(Arc::new(parsed::<DeviceClass>(class.clone())))
        };
        let mut shares = 0;
        let mut share_id = || {
            shares += 1;
            format!("share-{shares}")
        };
        let now = Timestamp::UNIX_EPOCH;
        allocate(
            &self.inventory(),
            &self.in_use,
            &classes,
            &claim,
            &self.bounds,
            now,
            &mut share_id,
        )
    }

    /// Returns `request=device` for each device, or why there is none.
    pub(super) fn chosen(&self, claim: &Value) -> Result<String, String> {
        self.allocate(claim)
            .map(|allocation| shown(&allocation))
            .map_err(|error| error.message)
    }

    /// Allocates for a claim that keeps its devices.
    pub(super) fn occupy(&mut self, uid: &str, claim: &Value) -> String {
        let allocation = self.allocate(claim).expect("an allocation");
        self.in_use.add(uid, &allocation);
        shown(&allocation)
    }

    /// Returns `request device: reason` for each device that was left out.
    pub(super) fn excluded(&self, claim: &Value) -> Vec<String> {
        let error = self.allocate(claim).expect_err("no allocation");
        error
            .devices
            .iter()
            .map(|left| format!("{} {}: {}", left.request, left.device, left.reason))
            .collect()
    }
}

fn shown(allocation: &AllocationResult) -> String {
    let results = allocation
        .devices
        .as_ref()
        .and_then(|devices| devices.results.as_ref())
        .expect("results");
    let results = results.iter().map(|result| {
        let consumed = result.consumed_capacity.iter().flatten();
        let consumed: String = consumed
            .map(|(name, amount)| format!(" {name}={}", amount.0))
            .collect();
        format!("{}={}{consumed}", result.request, result.device)
    });
    results.collect::<Vec<_>>().join(", ")
}
