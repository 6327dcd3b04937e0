//! The level `features`: what a driver says that it can do.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use nodedock_proto::kubelet::dra_health;
use serde_json::Value;
use tonic::{Code, Status};

use super::idempotency::{prepared, same};
use super::slices::{names, settled};
use super::{Facts, level};
use crate::files::read;
use crate::published::DeviceId;
use crate::report::Outcome;
use crate::test_node::{Plugin, STOP, TestNode};

level! {
    "features.health-list" => health_list,
    "features.health-devices" => health_devices,
    "features.health-again" => health_again,
    "features.metadata" => metadata,
    "features.counters" => counters,
    "features.taints" => taints,
    "features.admin-access" => admin_access,
    "features.rolling-update" => rolling_update,
}

/// Deadline for the first message of a health stream.
const HEALTH: Duration = Duration::from_secs(30);
/// Directory in a container of the files of KEP-5304.
const METADATA_DIRECTORY: &str = "/var/run/kubernetes.io/dra-device-attributes";

/// The devices of the first message that has some, of a stream that is opened for it.
macro_rules! first_list {
    ($version:ident, $client:expr) => {{
        let request = dra_health::$version::NodeWatchResourcesRequest {};
        let mut stream = $client.node_watch_resources(request).await?.into_inner();
        loop {
            let message = stream.message().await?.ok_or_else(ended)?;
            let ids = message
                .devices
                .into_iter()
                .filter_map(|device| device.device);
            let devices: Vec<_> = ids
                .map(|id| DeviceId {
                    pool: id.pool_name,
                    name: id.device_name,
                })
                .collect();
            if !devices.is_empty() {
                break Ok::<_, Status>(devices);
            }
        }
    }};
}

/// The first list of the newest service for health that the driver lists.
async fn list(node: &TestNode, plugin: &Plugin) -> Result<Vec<DeviceId>> {
    let is_newer = plugin
        .services
        .iter()
        .any(|service| service == "v1.DRAResourceHealth");
    let read = async {
        match is_newer {
            true => first_list!(v1, plugin.client.health_v1()),
            false => first_list!(v1alpha1, plugin.client.health_v1alpha1()),
        }
    };
    let devices = tokio::time::timeout(HEALTH, read).await;
    let devices = devices.context("the stream has no list of devices within 30 s")?;
    let devices = devices.map_err(|status| {
        let why = format!("the stream ends, {:?}: {}", status.code(), status.message());
        anyhow::Error::new(status).context(why)
    })?;
    node.log.add(format!("health of {devices:?}"));
    Ok(devices)
}

fn ended() -> Status {
    Status::unavailable("without a list of devices")
}

async fn health_list(node: &mut TestNode, facts: &Facts) -> Result<Outcome> {
    let plugin = node.begin().await?;
    match list(node, &plugin).await {
        Ok(_) => Ok(Outcome::Passed),
        // The official library lists the service for every driver.
        Err(error)
            if error
                .downcast_ref::<Status>()
                .is_some_and(|status| status.code() == Code::Unimplemented) =>
        {
            Ok(Outcome::NotDeclared(
                "it lists DRAResourceHealth and does not implement it".to_owned(),
            ))
        }
        Err(_) if facts.health_may_be_silent => Ok(Outcome::NotDeclared(
            "it says nothing of the health of its devices".to_owned(),
        )),
        Err(error) => Err(error),
    }
}

async fn health_devices(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let plugin = node.begin().await?;
    let listed = list(node, &plugin).await?;
    let is_published = |slices: &[Value]| {
        let known: BTreeSet<DeviceId> = names(slices).into_iter().collect();
        listed.iter().all(|device| known.contains(device))
    };
    // A slow driver may list devices before their slices are written.
    let time = node.options.slices_timeout;
    let published = node.slices_until(&plugin.name, time, is_published).await;
    if published.is_none() {
        let known = names(&node.slices_now(&plugin.name));
        let strangers = listed.iter().filter(|device| !known.contains(device));
        let strangers: Vec<_> = strangers.map(DeviceId::to_string).collect();
        bail!("the list has {}, and no slice has", strangers.join(", "));
    }
    Ok(Outcome::Passed)
}

async fn health_again(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let plugin = node.begin().await?;
    let mut before: BTreeSet<_> = list(node, &plugin).await?.into_iter().collect();
    // The first list of a slow driver may have come before all of its devices were there.
    for is_last in [false, true] {
        let again = list(node, &plugin).await.context("the second time")?;
        let again: BTreeSet<_> = again.into_iter().collect();
        if before == again {
            break;
        }
        ensure!(
            !is_last && before.is_subset(&again),
            "the first list has {before:?}, the second {again:?}"
        );
        before = again;
    }
    Ok(Outcome::Passed)
}

async fn metadata(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let (_, _, answer) = prepared(node).await?;
    let devices = node.directories.cdi_devices()?;
    let of_answer = answer
        .iter()
        .flat_map(|device| &device.cdi_device_ids)
        .filter_map(|id| devices.get(id));
    let mounts = of_answer
        .flat_map(|edits| [&edits["mounts"], &edits["ofAll"]["mounts"]])
        .filter_map(Value::as_array)
        .flatten();
    let mut files = mounts
        .filter(|mount| {
            mount["containerPath"]
                .as_str()
                .is_some_and(|path| path.starts_with(METADATA_DIRECTORY))
        })
        .filter_map(|mount| mount["hostPath"].as_str())
        .peekable();
    if files.peek().is_none() {
        return Ok(Outcome::NotDeclared(
            "its CDI devices mount no device metadata".to_owned(),
        ));
    }
    for file in files {
        let text = read(Path::new(file)).with_context(|| format!("read {file}"))?;
        let mut documents = serde_json::Deserializer::from_str(&text)
            .into_iter::<Value>()
            .peekable();
        ensure!(documents.peek().is_some(), "{file} is empty");
        for document in documents {
            let document = document.with_context(|| format!("{file} is no stream of JSON"))?;
            let version = document["apiVersion"].as_str().unwrap_or_default();
            ensure!(
                version.starts_with("metadata.resource.k8s.io/"),
                "{file} has the apiVersion {version:?}"
            );
        }
    }
    Ok(Outcome::Passed)
}

async fn counters(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let (_, slices) = settled(node).await?;
    let mut known = BTreeSet::new();
    for slice in &slices {
        for set in slice["spec"]["sharedCounters"]
            .as_array()
            .into_iter()
            .flatten()
        {
            let counters = set["counters"].as_object().into_iter().flatten();
            known.extend(
                counters.map(|(counter, _)| {
                    (pool_name(slice), set["name"].to_string(), counter.clone())
                }),
            );
        }
    }
    for slice in &slices {
        for device in slice["spec"]["devices"].as_array().into_iter().flatten() {
            for consumed in device["consumesCounters"].as_array().into_iter().flatten() {
                let set = consumed["counterSet"].to_string();
                for (counter, _) in consumed["counters"].as_object().into_iter().flatten() {
                    let is_known =
                        known.contains(&(pool_name(slice), set.clone(), counter.clone()));
                    ensure!(
                        is_known,
                        "device {} consumes {counter} of the counter set {set}, which pool {} does not have",
                        device["name"],
                        pool_name(slice)
                    );
                }
            }
        }
    }
    Ok(Outcome::Passed)
}

fn pool_name(slice: &Value) -> String {
    slice["spec"]["pool"]["name"]
        .as_str()
        .unwrap_or_default()
        .to_owned()
}

async fn taints(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let (_, slices) = settled(node).await?;
    for slice in slices {
        for device in slice["spec"]["devices"].as_array().into_iter().flatten() {
            for taint in device["taints"].as_array().into_iter().flatten() {
                let is_known = matches!(
                    taint["effect"].as_str(),
                    Some("None" | "NoSchedule" | "NoExecute")
                );
                let has_key = taint["key"].as_str().is_some_and(|key| !key.is_empty());
                ensure!(
                    is_known && has_key,
                    "device {} has the taint {taint}",
                    device["name"]
                );
            }
        }
    }
    Ok(Outcome::Passed)
}

async fn admin_access(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let (plugin, claim, first) = prepared(node).await?;
    let device = node.devices(&plugin).await?.swap_remove(0);
    let admin = node.admin_claim(&plugin, &device);
    plugin
        .client
        .prepare(&admin)
        .await
        .context("a claim with admin access")?;
    plugin
        .client
        .unprepare(&admin)
        .await
        .context("a claim with admin access")?;
    let when = "after the unprepare of a claim with admin access";
    same(&first, &plugin.client.prepare(&claim).await?, when)?;
    Ok(Outcome::Passed)
}

async fn rolling_update(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let first = node.begin().await?;
    let devices = node.devices(&first).await?;
    let old = node.process.take().context("the driver does not run")?;
    node.start()?;
    let second = node
        .registered(Some(&first.socket))
        .await
        .context("the second instance")?;
    ensure!(
        second.name == first.name,
        "the second instance has the name {:?}",
        second.name
    );
    let claim = node.claim(&first, &devices[0]);
    first
        .client
        .prepare(&claim)
        .await
        .context("by the first instance, beside the second")?;
    // One that does not end in time is killed: another case is about that.
    let _ = old.stop(STOP).await;
    second
        .client
        .unprepare_as_kubelet(&claim)
        .await
        .context("by the second instance")?;
    // Its registration is still there.
    node.registered(Some(&first.socket))
        .await
        .context("the second instance, after the end of the first")?;
    Ok(Outcome::Passed)
}
