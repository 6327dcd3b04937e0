//! The level `idempotency`: calls that are repeated.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use nodedock_stand_ins::kubelet::ClaimRef;
use serde_json::Value;

use super::{Facts, level};
use crate::report::Outcome;
use crate::test_node::{NAMESPACE, Plugin, TestNode};
use crate::wire::{Device, Version, failed};

level! {
    "idempotency.prepare-twice" => prepare_twice,
    "idempotency.v1beta1" => v1beta1,
    "idempotency.prepare-twice-files" => prepare_twice_files,
    "idempotency.same-edits" => same_edits,
    "idempotency.unprepare-unknown" => unprepare_unknown,
    "idempotency.unprepare-twice" => unprepare_twice,
    "idempotency.unprepare-files" => unprepare_files,
    "idempotency.unprepare-without-object" => unprepare_without_object,
    "idempotency.prepare-again" => prepare_again,
    "idempotency.prepare-after-restart" => prepare_after_restart,
    "idempotency.unprepare-after-restart" => unprepare_after_restart,
    "idempotency.unknown-after-restart" => unknown_after_restart,
}

/// A claim that is prepared, and the answer.
pub(super) async fn prepared(node: &mut TestNode) -> Result<(Plugin, ClaimRef, Vec<Device>)> {
    let plugin = node.begin().await?;
    let devices = node.devices(&plugin).await?;
    let claim = node.claim(&plugin, &devices[0]);
    let answer = plugin.client.prepare(&claim).await?;
    Ok((plugin, claim, answer))
}

pub(super) fn same(first: &[Device], second: &[Device], when: &str) -> Result<()> {
    ensure!(
        first == second,
        "the first answer is {first:?}, {when} it is {second:?}"
    );
    Ok(())
}

/// Those of an answer that some CDI file has.
fn in_files(node: &TestNode, answer: &[Device]) -> Result<Vec<String>> {
    let found = node.directories.cdi_devices()?;
    let ids = answer.iter().flat_map(|device| &device.cdi_device_ids);
    Ok(ids.filter(|id| found.contains_key(*id)).cloned().collect())
}

/// The edits that a container gets by an answer, by CDI device ID.
pub(super) fn edits(node: &TestNode, answer: &[Device]) -> Result<BTreeMap<String, Value>> {
    let mut found = node.directories.cdi_devices()?;
    let ids = answer.iter().flat_map(|device| &device.cdi_device_ids);
    Ok(ids
        .filter_map(|id| Some((id.clone(), found.remove(id)?)))
        .collect())
}

/// Fails if two prepares of a claim give a container other edits.
pub(super) fn same_container(
    first: &BTreeMap<String, Value>,
    second: &BTreeMap<String, Value>,
    when: &str,
) -> Result<()> {
    for (id, before) in first {
        let after = second.get(id);
        ensure!(
            after == Some(before),
            "the edits of {id} are {before}, and {when} {}",
            after.map_or("there are none".to_owned(), ToString::to_string)
        );
    }
    Ok(())
}

async fn same_edits(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let (plugin, claim, answer) = prepared(node).await?;
    let first = edits(node, &answer)?;
    let again = plugin.client.prepare(&claim).await?;
    same_container(&first, &edits(node, &again)?, "after a second prepare")?;
    Ok(Outcome::Passed)
}

async fn prepare_twice(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let (plugin, claim, first) = prepared(node).await?;
    same(
        &first,
        &plugin.client.prepare(&claim).await?,
        "the second time",
    )?;
    Ok(Outcome::Passed)
}

async fn v1beta1(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let plugin = node.begin().await?;
    let devices = node.devices(&plugin).await?;
    let claim = node.claim(&plugin, &devices[0]);
    let claims = std::slice::from_ref(&claim);
    let newer = plugin
        .client
        .prepare_by(Version::V1, claims)
        .await
        .map_err(|status| failed("prepare", &status))?;
    let older = plugin
        .client
        .prepare_by(Version::V1beta1, claims)
        .await
        .map_err(|status| failed("prepare by v1beta1", &status))?;
    let (mut newer, older) = (newer.of(&claim)?, older.of(&claim)?);
    // v1beta1 has no share IDs.
    newer.iter_mut().for_each(|device| device.share_id = None);
    ensure!(newer == older, "v1 answers {newer:?}, v1beta1 {older:?}");
    plugin
        .client
        .unprepare_by(Version::V1beta1, claims)
        .await
        .map_err(|status| failed("unprepare by v1beta1", &status))?
        .of(&claim)?;
    Ok(Outcome::Passed)
}

async fn prepare_twice_files(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let (plugin, claim, first) = prepared(node).await?;
    plugin.client.prepare(&claim).await?;
    let ids: usize = first.iter().map(|device| device.cdi_device_ids.len()).sum();
    let found = in_files(node, &first)?;
    ensure!(
        found.len() == ids,
        "of {ids} CDI devices the files have {found:?}"
    );
    Ok(Outcome::Passed)
}

/// A claim of which no driver has heard; each number has another.
fn unknown(number: usize) -> ClaimRef {
    ClaimRef::new(
        NAMESPACE,
        &format!("never-{number}"),
        &format!("99999999-0000-4000-8000-{number:012}"),
    )
}

async fn unprepare_unknown(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let plugin = node.begin().await?;
    // A driver may know a claim that it has unprepared.
    for (number, version) in plugin.versions().enumerate() {
        plugin
            .client
            .unprepare_one_by(version, &unknown(number))
            .await?;
    }
    Ok(Outcome::Passed)
}

async fn unprepare_twice(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let plugin = node.begin().await?;
    let devices = node.devices(&plugin).await?;
    for version in plugin.versions() {
        let claim = node.claim(&plugin, &devices[0]);
        plugin.client.prepare(&claim).await?;
        plugin.client.unprepare_one_by(version, &claim).await?;
        plugin
            .client
            .unprepare_one_by(version, &claim)
            .await
            .context("the second time")?;
    }
    Ok(Outcome::Passed)
}

async fn unprepare_files(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let (plugin, claim, answer) = prepared(node).await?;
    plugin.client.unprepare(&claim).await?;
    none_left(node, &plugin, &answer).await?;
    Ok(Outcome::Passed)
}

/// Checks that no file has a device of an answer whose claim was unprepared. One that the answer for another claim names too may stay.
async fn none_left(node: &mut TestNode, plugin: &Plugin, answer: &[Device]) -> Result<()> {
    let left = in_files(node, answer)?;
    if left.is_empty() {
        return Ok(());
    }
    let devices = node.devices(plugin).await?;
    let another = node.claim(plugin, &devices[0]);
    let of_another = plugin.client.prepare(&another).await?;
    let left: Vec<_> = left
        .into_iter()
        .filter(|id| !{
            of_another
                .iter()
                .any(|device| device.cdi_device_ids.contains(id))
        })
        .collect();
    ensure!(
        left.is_empty(),
        "after the unprepare CDI files have {left:?}"
    );
    Ok(())
}

async fn unprepare_without_object(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let (plugin, claim, _) = prepared(node).await?;
    node.delete_claim(&claim);
    plugin.client.unprepare(&claim).await?;
    Ok(Outcome::Passed)
}

async fn prepare_again(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let (plugin, claim, _) = prepared(node).await?;
    plugin.client.unprepare(&claim).await?;
    plugin
        .client
        .prepare(&claim)
        .await
        .context("after it was unprepared")?;
    Ok(Outcome::Passed)
}

async fn prepare_after_restart(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let (_, claim, first) = prepared(node).await?;
    let plugin = node.restart().await?;
    same(
        &first,
        &plugin.client.prepare_as_kubelet(&claim).await?,
        "after a restart",
    )?;
    Ok(Outcome::Passed)
}

async fn unprepare_after_restart(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let (_, claim, answer) = prepared(node).await?;
    let plugin = node.restart().await?;
    plugin.client.unprepare_as_kubelet(&claim).await?;
    none_left(node, &plugin, &answer).await?;
    Ok(Outcome::Passed)
}

async fn unknown_after_restart(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let (plugin, claim, _) = prepared(node).await?;
    plugin.client.unprepare(&claim).await?;
    let plugin = node.restart().await?;
    plugin.client.unprepare_as_kubelet(&unknown(0)).await?;
    plugin
        .client
        .unprepare_as_kubelet(&claim)
        .await
        .context("the second time, after a restart")?;
    Ok(Outcome::Passed)
}
