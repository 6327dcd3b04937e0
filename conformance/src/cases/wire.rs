//! The level `wire`: registration, and the messages of calls.

use std::collections::BTreeSet;
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail, ensure};
use serde_json::Value;
use tonic::Code;

use super::{Facts, level};
use crate::published::DeviceId;
use crate::report::Outcome;
use crate::test_node::{Plugin, REQUEST, TestNode};
use crate::wire::failed;
use nodedock_model::{DriverName, is_cdi_qualified_name};
use nodedock_stand_ins::kubelet::ClaimRef;

level! {
    "wire.registers" => registers,
    "wire.name" => name,
    "wire.services" => services,
    "wire.endpoint" => endpoint,
    "wire.notified" => notified,
    "wire.empty" => empty,
    "wire.prepare" => prepare,
    "wire.unprepare" => unprepare,
    "wire.unknown-fields" => unknown_fields,
    "wire.devices" => devices,
    "wire.requests" => requests,
    "wire.cdi-ids" => cdi_ids,
    "wire.cdi-files" => cdi_files,
    "wire.batch" => batch,
    "wire.batch-strangers" => batch_strangers,
    "wire.batch-independent" => batch_independent,
    "wire.driver-batch" => driver_batch,
    "wire.driver-batch-independent" => driver_batch_independent,
}

/// Maximum length of the path of a Unix socket, which leaves room for the zero byte at its end.
const SOCKET_BYTES_MAX: usize = 107;
/// Notifications, of which the driver has to answer one.
const NOTIFICATIONS: usize = 3;

async fn registers(node: &mut TestNode, facts: &Facts) -> Result<Outcome> {
    if let Some((why, messages)) = &facts.failure {
        messages.iter().for_each(|line| node.log.add(line.clone()));
        bail!("{why}");
    }
    Ok(Outcome::Passed)
}

async fn name(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let plugin = node.begin().await?;
    DriverName::new(plugin.name.as_str()).map_err(|error| anyhow!("{error}"))?;
    Ok(Outcome::Passed)
}

async fn services(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let plugin = node.begin().await?;
    let listed = &plugin.services;
    ensure!(
        listed.iter().any(|service| service == "v1.DRAPlugin"),
        "{listed:?} does not have v1.DRAPlugin"
    );
    for version in plugin.versions() {
        if let Err(status) = plugin.client.prepare_by(version, &[]).await {
            ensure!(
                status.code() != Code::Unimplemented,
                "{} is listed and not served: {}",
                version.service(),
                status.message()
            );
        }
    }
    Ok(Outcome::Passed)
}

async fn endpoint(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    node.start()?;
    // The caller that gets the first answer may call at once.
    let (_, info) = node.announced().await?.context("it is no DRA driver now")?;
    let endpoint = Path::new(&info.endpoint);
    ensure!(
        endpoint.is_absolute(),
        "{:?} is not absolute",
        info.endpoint
    );
    let bytes = info.endpoint.len();
    ensure!(
        bytes <= SOCKET_BYTES_MAX,
        "{:?} has {bytes} bytes, {SOCKET_BYTES_MAX} at most",
        info.endpoint
    );
    node.dial(endpoint).await?;
    Ok(Outcome::Passed)
}

async fn notified(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let mut plugin = node.begin().await?;
    for _ in 1..NOTIFICATIONS {
        if plugin.notified.is_ok() {
            break;
        }
        // A kubelet registers a plugin again as well.
        plugin = node.registered(None).await?;
    }
    plugin
        .notified
        .map_err(|why| anyhow!("NotifyRegistrationStatus: {why}"))?;
    let (_, info) = node
        .announced()
        .await
        .context("after the notification")?
        .context("it is no DRA driver after the notification")?;
    ensure!(
        info.name == plugin.name,
        "the name is now {:?}, and was {:?}",
        info.name,
        plugin.name
    );
    Ok(Outcome::Passed)
}

async fn empty(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let plugin = node.begin().await?;
    for version in plugin.versions() {
        let prepared = plugin
            .client
            .prepare_by(version, &[])
            .await
            .map_err(|status| failed("prepare", &status))?;
        let unprepared = plugin
            .client
            .unprepare_by(version, &[])
            .await
            .map_err(|status| failed("unprepare", &status))?;
        ensure!(
            prepared.0.is_empty() && unprepared.0.is_empty(),
            "{} answers for claims that were not asked for",
            version.service()
        );
    }
    Ok(Outcome::Passed)
}

async fn prepare(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let plugin = node.begin().await?;
    let devices = node.devices(&plugin).await?;
    let claim = node.claim(&plugin, &devices[0]);
    plugin.client.prepare(&claim).await?;
    Ok(Outcome::Passed)
}

async fn unprepare(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let plugin = node.begin().await?;
    let devices = node.devices(&plugin).await?;
    let claim = node.claim(&plugin, &devices[0]);
    plugin.client.prepare(&claim).await?;
    plugin.client.unprepare(&claim).await?;
    Ok(Outcome::Passed)
}

async fn unknown_fields(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let plugin = node.begin().await?;
    let devices = node.devices(&plugin).await?;
    let claim = node.claim(&plugin, &devices[0]);
    for version in plugin.versions() {
        let answer = plugin.client.prepare_later(version, &claim).await;
        answer
            .map_err(|status| failed(&format!("prepare by {version:?}"), &status))?
            .of(&claim)?;
    }
    Ok(Outcome::Passed)
}

async fn devices(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let plugin = node.begin().await?;
    let devices = node.devices(&plugin).await?;
    // One that is not the first: a driver may not just answer with what it has.
    let device = devices.get(1).unwrap_or(&devices[0]);
    let claim = node.claim(&plugin, device);
    let answer = plugin.client.prepare(&claim).await?;
    let answered: Vec<_> = answer
        .iter()
        .map(|one| format!("{}/{}", one.pool_name, one.device_name))
        .collect();
    let allocated = format!("{}/{}", device.pool, device.name);
    ensure!(
        answered == [allocated.clone()],
        "{allocated} is allocated, and the answer has {answered:?}"
    );
    Ok(Outcome::Passed)
}

async fn requests(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let plugin = node.begin().await?;
    let devices = node.devices(&plugin).await?;
    let claim = node.claim(&plugin, &devices[0]);
    let answer = plugin.client.prepare(&claim).await?;
    let named: Vec<&String> = answer
        .iter()
        .flat_map(|device| &device.request_names)
        .collect();
    ensure!(
        named.iter().all(|name| *name == REQUEST),
        "the claim has the request {REQUEST:?} alone, and the answer names {named:?}"
    );
    Ok(Outcome::Passed)
}

async fn cdi_ids(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let plugin = node.begin().await?;
    let devices = node.devices(&plugin).await?;
    let claim = node.claim(&plugin, &devices[0]);
    for device in plugin.client.prepare(&claim).await? {
        let mut known = BTreeSet::new();
        for id in &device.cdi_device_ids {
            ensure!(
                is_cdi_qualified_name(id),
                "{id:?} is no qualified name, VENDOR/CLASS=NAME"
            );
            ensure!(
                known.insert(id),
                "{id:?} is there twice for device {}",
                device.device_name
            );
        }
    }
    Ok(Outcome::Passed)
}

async fn cdi_files(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let plugin = node.begin().await?;
    let devices = node.devices(&plugin).await?;
    let claim = node.claim(&plugin, &devices[0]);
    let answer = plugin.client.prepare(&claim).await?;
    let ids: Vec<&String> = answer
        .iter()
        .flat_map(|device| &device.cdi_device_ids)
        .collect();
    if ids.is_empty() {
        return Ok(Outcome::NotDeclared(
            "its answers name no CDI devices".to_owned(),
        ));
    }
    let found = node.directories.cdi_devices()?;
    for id in ids {
        ensure!(
            found.contains_key(id),
            "no CDI file has {id}; there are {:?}",
            found.keys()
        );
    }
    Ok(Outcome::Passed)
}

/// Claims for different devices, at most three.
async fn several(node: &mut TestNode, plugin: &Plugin) -> Result<Vec<ClaimRef>> {
    let devices = node.devices(plugin).await?;
    Ok(devices
        .iter()
        .take(3)
        .map(|device| node.claim(plugin, device))
        .collect())
}

async fn batch(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let plugin = node.begin().await?;
    for version in plugin.versions() {
        let claims = several(node, &plugin).await?;
        let call = |call: &str| format!("{call} by {version:?}");
        let prepared = plugin.client.prepare_by(version, &claims).await;
        let prepared = prepared.map_err(|status| failed(&call("prepare"), &status))?;
        let unprepared = plugin.client.unprepare_by(version, &claims).await;
        let unprepared = unprepared.map_err(|status| failed(&call("unprepare"), &status))?;
        for (call, answer) in [(call("prepare"), prepared), (call("unprepare"), unprepared)] {
            for claim in &claims {
                let is_there = answer.0.iter().any(|(uid, _)| *uid == claim.uid);
                ensure!(
                    is_there,
                    "the answer of {call} has no entry for claim {} ({})",
                    claim.name,
                    claim.uid
                );
            }
        }
    }
    Ok(Outcome::Passed)
}

async fn batch_strangers(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let plugin = node.begin().await?;
    let claims = several(node, &plugin).await?;
    for version in plugin.versions() {
        let prepared = plugin.client.prepare_by(version, &claims).await;
        let prepared =
            prepared.map_err(|status| failed(&format!("prepare by {version:?}"), &status))?;
        let mut known = BTreeSet::new();
        for (uid, _) in &prepared.0 {
            ensure!(
                claims.iter().any(|claim| claim.uid == *uid),
                "the answer of {version:?} has claim {uid}, which was not asked for"
            );
            ensure!(
                known.insert(uid),
                "the answer of {version:?} has claim {uid} twice"
            );
        }
    }
    Ok(Outcome::Passed)
}

/// Parameters that no driver knows.
fn unknown_parameters() -> Value {
    serde_json::json!({
        "apiVersion": "conformance.nodedock.dev/v1",
        "kind": "Unknown",
        "noDriverHasThisKey": true,
    })
}

/// Prepares claims for at most three devices in one call of the driver; with `parameters`, a fourth has these.
async fn in_one_call(node: &mut TestNode, parameters: Option<&Value>) -> Result<Outcome> {
    let plugin = node.begin().await?;
    let mut devices = node.devices(&plugin).await?;
    devices.truncate(3 + usize::from(parameters.is_some()));
    let (pod, claims) = node.claims_of_a_pod(&plugin, &devices, parameters);
    let expected = claims.len() - usize::from(parameters.is_some());
    let outcomes = node.daemon().await?.prepare(&pod, &claims).await?;
    for claim in &claims[..expected] {
        let outcome = outcomes.iter().find(|(name, _)| *name == claim.name);
        match outcome {
            None => bail!("claim {} has no outcome", claim.name),
            Some((name, Some(refusal))) => bail!(
                "claim {name}, one of {} in a call of the driver, is refused: {refusal}",
                claims.len()
            ),
            Some((_, None)) => {}
        }
    }
    Ok(Outcome::Passed)
}

async fn driver_batch(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    in_one_call(node, None).await
}

async fn driver_batch_independent(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    in_one_call(node, Some(&unknown_parameters())).await
}

async fn batch_independent(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let plugin = node.begin().await?;
    let claims = several(node, &plugin).await?;
    let pool = node.devices(&plugin).await?.swap_remove(0).pool;
    let unknown = node.claim(
        &plugin,
        &DeviceId {
            pool,
            name: "no-such-device".to_owned(),
        },
    );
    let call: Vec<ClaimRef> = std::iter::once(unknown)
        .chain(claims.iter().cloned())
        .collect();
    for version in plugin.versions() {
        let when =
            || format!("prepare by {version:?} with a claim for a device that does not exist");
        let answer = plugin.client.prepare_by(version, &call).await;
        let answer = answer.map_err(|status| failed(&when(), &status))?;
        for claim in &claims {
            answer.of(claim).with_context(when)?;
        }
    }
    Ok(Outcome::Passed)
}
