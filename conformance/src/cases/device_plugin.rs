//! The level `device-plugin`: what a kubelet's device manager asks of a device plugin.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context, Result, anyhow, ensure};
use nodedock_model::ExtendedResource;
use nodedock_proto::kubelet::device_plugin::v1beta1::device_plugin_client::DevicePluginClient;
use nodedock_proto::kubelet::device_plugin::v1beta1::{
    AllocateRequest, AllocateResponse, ContainerAllocateRequest,
    ContainerPreferredAllocationRequest, Device, Empty, PreferredAllocationRequest,
};
use tonic::transport::Channel;
use tonic::{Response, Status};

use super::{Facts, level};
use crate::report::Outcome;
use crate::test_node::TestNode;

level! {
    "device-plugin.registers" => registers,
    "device-plugin.options" => options,
    "device-plugin.list" => list,
    "device-plugin.list-stable" => list_stable,
    "device-plugin.allocate" => allocate,
    "device-plugin.allocate-again" => allocate_again,
    "device-plugin.allocate-unknown" => allocate_unknown,
    "device-plugin.preferred" => preferred,
    "device-plugin.kubelet-restart" => kubelet_restart,
}

/// Deadline for the first list.
const LIST: Duration = Duration::from_secs(30);

async fn begin(node: &mut TestNode) -> Result<DevicePluginClient<Channel>> {
    node.start()?;
    Ok(node.device_plugin().await?.1)
}

async fn registers(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    node.start()?;
    let (request, _) = node.device_plugin().await?;
    ensure!(
        request.version == "v1beta1",
        "the version is {:?}, not \"v1beta1\"",
        request.version
    );
    ExtendedResource::new(request.resource_name.as_str()).map_err(|error| anyhow!("{error}"))?;
    Ok(Outcome::Passed)
}

async fn options(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let mut client = begin(node).await?;
    let asking = client.get_device_plugin_options(Empty {});
    within(node, "GetDevicePluginOptions", asking).await?;
    Ok(Outcome::Passed)
}

/// The answer to a call, within its deadline.
pub(super) async fn within<T>(
    node: &TestNode,
    call: &str,
    asking: impl Future<Output = Result<Response<T>, Status>>,
) -> Result<T> {
    let answer = tokio::time::timeout(node.options.call_timeout, asking).await;
    let answer = answer.with_context(|| format!("{call} is not answered within its deadline"))?;
    let answer =
        answer.map_err(|status| anyhow!("{call}, {:?}: {}", status.code(), status.message()))?;
    Ok(answer.into_inner())
}

/// The first list.
async fn devices(node: &TestNode, client: &mut DevicePluginClient<Channel>) -> Result<Vec<Device>> {
    let read = async {
        let mut lists = client.list_and_watch(Empty {}).await?.into_inner();
        lists.message().await
    };
    let list = tokio::time::timeout(LIST, read)
        .await
        .context("ListAndWatch has no list within 30 s")?;
    let list = list
        .map_err(|status| anyhow!("ListAndWatch: {status}"))?
        .context("ListAndWatch ends without a list")?;
    let named: Vec<_> = list
        .devices
        .iter()
        .map(|device| format!("{} {}", device.id, device.health))
        .collect();
    node.log.add(format!("ListAndWatch: {named:?}"));
    Ok(list.devices)
}

/// IDs of devices that can be allocated.
async fn healthy(node: &TestNode, client: &mut DevicePluginClient<Channel>) -> Result<Vec<String>> {
    let devices = devices(node, client).await?;
    let healthy = devices
        .into_iter()
        .filter(|device| device.health == "Healthy");
    let ids: Vec<String> = healthy.map(|device| device.id).collect();
    ensure!(!ids.is_empty(), "no device is healthy");
    Ok(ids)
}

async fn list(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let mut client = begin(node).await?;
    let devices = devices(node, &mut client).await?;
    ensure!(!devices.is_empty(), "the list has no device");
    let mut known = BTreeSet::new();
    for Device { id, health, .. } in &devices {
        ensure!(
            !id.is_empty() && known.insert(id),
            "the ID {id:?} is empty or there twice"
        );
        ensure!(
            matches!(health.as_str(), "Healthy" | "Unhealthy"),
            "device {id} has the health {health:?}"
        );
    }
    Ok(Outcome::Passed)
}

async fn list_stable(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let mut client = begin(node).await?;
    let before = ids(devices(node, &mut client).await?);
    node.stop().await?;
    node.registrations.forget();
    let mut client = begin(node).await?;
    let after = ids(devices(node, &mut client).await?);
    ensure!(
        before == after,
        "the IDs were {before:?}, and are after a restart {after:?}"
    );
    Ok(Outcome::Passed)
}

fn ids(devices: Vec<Device>) -> BTreeSet<String> {
    devices
        .into_iter()
        .map(|device| device.id)
        .collect::<BTreeSet<_>>()
}

async fn ask(
    node: &TestNode,
    client: &mut DevicePluginClient<Channel>,
    containers: &[&[String]],
) -> Result<AllocateResponse> {
    let request = AllocateRequest {
        container_requests: containers
            .iter()
            .map(|ids| ContainerAllocateRequest {
                devices_ids: ids.to_vec(),
            })
            .collect(),
    };
    node.log.add(format!("→ Allocate {containers:?}"));
    let answer = within(node, "Allocate", client.allocate(request)).await;
    node.log.add(format!("← {answer:?}"));
    answer
}

async fn allocate(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let mut client = begin(node).await?;
    let ids = healthy(node, &mut client).await?;
    let containers: Vec<&[String]> = ids.chunks(1).take(2).collect();
    let answer = ask(node, &mut client, &containers).await?;
    let (answers, asked) = (answer.container_responses.len(), containers.len());
    ensure!(
        answers == asked,
        "the answer is for {answers} containers, the request for {asked}"
    );
    Ok(Outcome::Passed)
}

async fn allocate_again(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let mut client = begin(node).await?;
    let ids = healthy(node, &mut client).await?;
    let first = ask(node, &mut client, &[&ids[..1]]).await?;
    let again = ask(node, &mut client, &[&ids[..1]]).await?;
    ensure!(
        first == again,
        "the first answer is {first:?}, the second {again:?}"
    );
    Ok(Outcome::Passed)
}

async fn allocate_unknown(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let mut client = begin(node).await?;
    devices(node, &mut client).await?;
    let answer = ask(node, &mut client, &[&["no-such-device".to_owned()]]).await;
    ensure!(
        answer.is_err(),
        "a device that the plugin does not have is allocated"
    );
    Ok(Outcome::Passed)
}

async fn preferred(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let mut client = begin(node).await?;
    let ids = healthy(node, &mut client).await?;
    let must: Vec<String> = ids.last().cloned().into_iter().collect();
    let size = ids.len().min(2);
    let request = PreferredAllocationRequest {
        container_requests: vec![ContainerPreferredAllocationRequest {
            available_device_ids: ids.clone(),
            must_include_device_ids: must.clone(),
            allocation_size: i32::try_from(size).context("a size")?,
        }],
    };
    let answer = within(
        node,
        "GetPreferredAllocation",
        client.get_preferred_allocation(request),
    )
    .await?;
    let given: Vec<_> = answer
        .container_responses
        .into_iter()
        .map(|container| container.device_ids)
        .collect();
    node.log.add(format!(
        "GetPreferredAllocation {size} of {ids:?} with {must:?}: {given:?}"
    ));
    let [given] = given.as_slice() else {
        anyhow::bail!(
            "the answer is for {} containers, the request for one",
            given.len()
        )
    };
    let given_once: BTreeSet<&String> = given.iter().collect();
    let is_right =
        given.len() == size && given_once.len() == size && given.iter().all(|id| ids.contains(id));
    ensure!(
        is_right && must.iter().all(|id| given.contains(id)),
        "of {ids:?} with {must:?} it prefers {given:?} for a size of {size}"
    );
    Ok(Outcome::Passed)
}

async fn kubelet_restart(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    begin(node).await?;
    node.log.add("the kubelet starts again");
    node.registrations.serve().await?;
    let (_, mut client) = node
        .device_plugin()
        .await
        .context("after the kubelet has started again")?;
    devices(node, &mut client).await?;
    Ok(Outcome::Passed)
}
