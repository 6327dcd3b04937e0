//! The mechanism by which an extended resource is offered, its devices and its adapter.

use std::collections::BTreeSet;

use anyhow::Result;
use nodedock_proto::node::v1;

use super::{condition_lines, devices, left_out_lines};
use crate::adapter::waits;
use crate::client::Client;
use crate::names;
use crate::output::{join, print_text};
use nodedock_kube::extended_resources::class_name;
use nodedock_model::{DriverName, ExtendedResource};

pub(super) async fn resource(mut client: Client, name: &str) -> Result<()> {
    let resources = client
        .get_capacity(v1::GetCapacityRequest {})
        .await?
        .into_inner()
        .resources;
    let adapters = client
        .list_adapters(v1::ListAdaptersRequest {})
        .await?
        .into_inner()
        .adapters;
    let adapters = adapters.iter().filter(|adapter| adapter.resource == name);
    let adapter: Vec<_> = adapters.flat_map(adapter_lines).collect();
    let node = client.get_node(v1::GetNodeRequest {}).await?.into_inner();
    let v1::ListDevicesResponse { devices, left_out } = devices(&mut client).await?;
    let left_out = left_out.iter().filter(|of| of.extended_resource == name);
    let left_out: Vec<_> = left_out.flat_map(left_out_lines).collect();
    let Some(resource) = resources.iter().find(|resource| resource.name == name) else {
        let conditions: Vec<_> = condition_lines(&node.conditions, |of| of.subject == name);
        if adapter.is_empty() && conditions.is_empty() {
            return Err(names::unknown("resource", name));
        }
        let not_offered = vec![format!("{name} is not offered")];
        return print_text(&join([not_offered, conditions, left_out, adapter].concat()));
    };
    let of_resource = devices
        .iter()
        .filter(|device| device.extended_resource == resource.name);
    let pools = of_resource
        .map(|device| format!("{}/{}", device.driver, device.pool))
        .collect();
    let lines = resource_lines(resource, &pools, &node.conditions);
    print_text(&join([lines, left_out, adapter].concat()))
}

/// Describes an adapter's use of a resource, and the devices that it cannot offer yet.
fn adapter_lines(adapter: &v1::Adapter) -> Vec<String> {
    let v1::Adapter {
        driver,
        source,
        enabled,
        removed,
        held,
        mechanism,
        ..
    } = adapter;
    let is_of_cluster = !mechanism.is_empty();
    let state = match (removed, enabled) {
        (true, _) => "is in no file any more, and acts as a disabled one",
        (false, true) if is_of_cluster => "is enabled: the scheduler is to have the devices",
        (false, true) => "is enabled",
        (false, false) if !is_of_cluster => "is disabled, which changes nothing without Kubernetes",
        (false, false) => "is disabled: the kubelet's device manager is to have the devices",
    };
    let mut lines = vec![format!("  adapter: driver {driver} of {source} {state}")];
    lines.extend(waits(adapter).map(|line| format!("  {line}")));
    if !held.is_empty() {
        lines.push(format!(
            "  pods have from the time before the adapter: {}",
            held.join(", ")
        ));
    }
    lines
}

/// `pools`: of the resource, as `DRIVER/POOL`.
fn resource_lines(
    resource: &v1::Resource,
    pools: &BTreeSet<String>,
    conditions: &[v1::Condition],
) -> Vec<String> {
    let v1::Resource {
        name,
        capacity,
        allocatable,
        allocated,
        driver,
        mechanism,
        mechanism_reason,
        ..
    } = resource;
    let offered = match mechanism.as_str() {
        "" => "is allocated by this daemon".to_owned(),
        "none" => "is offered by neither mechanism now".to_owned(),
        mechanism => format!("is offered by {mechanism}"),
    };
    let from = if driver.is_empty() {
        "no plugin or driver"
    } else {
        driver
    };
    let mut lines = vec![
        format!("{name} of {from} {offered}"),
        format!("  {capacity} devices, {allocatable} healthy, {allocated} allocated"),
    ];
    lines.extend((!mechanism_reason.is_empty()).then(|| format!("  because: {mechanism_reason}")));
    if !mechanism.is_empty()
        && let (Ok(resource), Ok(_)) = (ExtendedResource::new(name), DriverName::new(driver))
    {
        let class = class_name(&resource);
        lines.push(format!(
            "  DeviceClass: {class}, of which pods also request deviceclass.resource.kubernetes.io/{class}"
        ));
    }
    lines.extend(condition_lines(conditions, |condition| {
        condition.subject == *name || pools.contains(&condition.subject)
    }));
    lines
}

#[cfg(test)]
mod tests {
    use super::super::fixtures::condition;
    use super::*;

    #[test]
    fn standalone_adapter_explanation_mentions_no_kubelet() {
        let lines = |mechanism: &str| {
            let (mechanism, reason) = (mechanism.to_owned(), "the plugin is gone".to_owned());
            adapter_lines(&v1::Adapter {
                mechanism,
                reason,
                ..v1::Adapter::default()
            })
            .join(" ")
        };
        assert!(!lines("").contains("kubelet") && lines("").contains("the plugin is gone"));
        assert!(lines("none").contains("kubelet's device manager is to have the devices"));
    }

    #[test]
    fn resource_explanation_has_mechanism_and_conditions() {
        let resource = v1::Resource {
            name: "example.com/gpu".into(),
            driver: "gpu.example.com".into(),
            mechanism: "dra".into(),
            mechanism_reason: "of the test".into(),
            capacity: 8,
            allocatable: 7,
            allocated: 1,
            ..Default::default()
        };
        let conditions = [
            condition("example.com/gpu", "no class"),
            condition("gpu.example.com/gpus", "withheld"),
            condition("gpu.example.com/nics", "another"),
        ];
        let pools = ["gpu.example.com/gpus".to_owned()].into();
        let text = join(resource_lines(&resource, &pools, &conditions));
        for part in [
            "example.com/gpu of gpu.example.com is offered by dra\n",
            "8 devices, 7 healthy, 1 allocated",
            "because: of the test",
            "deviceclass.resource.kubernetes.io/example.com-gpu",
            "no class",
            "withheld",
        ] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(!text.contains("another"), "{text}");
        let plain = v1::Resource {
            mechanism: String::new(),
            mechanism_reason: String::new(),
            ..resource
        };
        let text = join(resource_lines(&plain, &pools, &[]));
        assert!(
            text.contains("is allocated by this daemon") && !text.contains("because"),
            "{text}"
        );
    }
}
