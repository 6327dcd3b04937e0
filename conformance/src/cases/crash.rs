//! The level `crash`: drivers that are killed, reboots, and damaged state.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};

use super::idempotency::{edits, prepared, same, same_container};
use super::{Facts, level};
use crate::files::empty;
use crate::published::DeviceId;
use crate::report::Outcome;
use crate::test_node::{Plugin, TestNode};
use nodedock_stand_ins::kubelet::ClaimRef;

level! {
    "crash.registers-again" => registers_again,
    "crash.after-prepare" => after_prepare,
    "crash.in-prepare" => in_prepare,
    "crash.in-unprepare" => in_unprepare,
    "crash.reboot" => reboot,
    "crash.reboot-edits" => reboot_edits,
    "crash.reboot-unprepare" => reboot_unprepare,
    "crash.state-corrupt" => state_corrupt,
    "crash.state-truncated" => state_truncated,
    "crash.state-read-only" => state_read_only,
    "crash.state-gone" => state_gone,
}

/// Milliseconds from a request to the crash.
const CRASHES: [u64; 10] = [0, 1, 2, 3, 4, 6, 8, 12, 16, 20];

async fn registers_again(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let before = node.begin().await?;
    let after = node.crash().await.context("after a crash")?;
    ensure!(
        before.name == after.name,
        "the name is now {:?}, and was {:?}",
        after.name,
        before.name
    );
    Ok(Outcome::Passed)
}

async fn after_prepare(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let (_, claim, first) = prepared(node).await?;
    let plugin = node.crash().await?;
    same(
        &first,
        &plugin.client.prepare_as_kubelet(&claim).await?,
        "after a crash",
    )?;
    Ok(Outcome::Passed)
}

/// Begins a call, and kills the driver some time later.
async fn kill_during(
    node: &mut TestNode,
    plugin: &Plugin,
    claim: &ClaimRef,
    after: u64,
    is_prepare: bool,
) -> Result<Plugin> {
    let (client, claim) = (plugin.client.clone(), claim.clone());
    let call = tokio::spawn(async move {
        // Whether it is answered depends on the moment.
        let _ = if is_prepare {
            client.prepare(&claim).await.map(drop)
        } else {
            client.unprepare(&claim).await
        };
    });
    tokio::time::sleep(Duration::from_millis(after)).await;
    let plugin = node.crash().await;
    call.abort();
    plugin
}

async fn in_prepare(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let mut plugin = node.begin().await?;
    let devices = node.devices(&plugin).await?;
    for after in CRASHES {
        let claim = node.claim(&plugin, &devices[0]);
        plugin = kill_during(node, &plugin, &claim, after, true).await?;
        let when = || format!("after a crash {after} ms after the prepare began");
        plugin
            .client
            .prepare_as_kubelet(&claim)
            .await
            .with_context(when)?;
        plugin
            .client
            .unprepare_as_kubelet(&claim)
            .await
            .with_context(when)?;
    }
    Ok(Outcome::Passed)
}

async fn in_unprepare(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let mut plugin = node.begin().await?;
    let devices = node.devices(&plugin).await?;
    for after in CRASHES {
        let claim = node.claim(&plugin, &devices[0]);
        plugin.client.prepare(&claim).await?;
        plugin = kill_during(node, &plugin, &claim, after, false).await?;
        plugin
            .client
            .unprepare_as_kubelet(&claim)
            .await
            .with_context(|| format!("after a crash {after} ms after the unprepare began"))?;
    }
    Ok(Outcome::Passed)
}

async fn reboot(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let (_, claim, _) = prepared(node).await?;
    if let Some(why) = node.reboot().await? {
        return Ok(Outcome::NotDeclared(why));
    }
    let plugin = node.begin().await.context("after a reboot")?;
    let answer = plugin
        .client
        .prepare_as_kubelet(&claim)
        .await
        .context("after a reboot")?;
    let found = node.directories.cdi_devices()?;
    for id in answer.iter().flat_map(|device| &device.cdi_device_ids) {
        ensure!(
            found.contains_key(id),
            "after a reboot the answer names {id}, and no CDI file has it"
        );
    }
    Ok(Outcome::Passed)
}

async fn reboot_edits(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let (_, claim, answer) = prepared(node).await?;
    let first = edits(node, &answer)?;
    if let Some(why) = node.reboot().await? {
        return Ok(Outcome::NotDeclared(why));
    }
    let plugin = node.begin().await.context("after a reboot")?;
    let again = plugin.client.prepare_as_kubelet(&claim).await;
    let again = again.context("after a reboot")?;
    same_container(&first, &edits(node, &again)?, "after a reboot")?;
    Ok(Outcome::Passed)
}

async fn reboot_unprepare(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let (_, claim, _) = prepared(node).await?;
    if let Some(why) = node.reboot().await? {
        return Ok(Outcome::NotDeclared(why));
    }
    let plugin = node.begin().await.context("after a reboot")?;
    plugin
        .client
        .unprepare_as_kubelet(&claim)
        .await
        .context("after a reboot")?;
    Ok(Outcome::Passed)
}

/// Prepares a claim, damages the state between two runs, and prepares another claim. Without a state file there is nothing to damage.
async fn damaged(node: &mut TestNode, damage: impl Fn(&Path) -> Result<()>) -> Result<Outcome> {
    let (plugin, claim, _) = prepared(node).await?;
    let devices: Vec<DeviceId> = node.devices(&plugin).await?;
    plugin.client.unprepare(&claim).await?;
    let claim = node.claim(&plugin, &devices[0]);
    plugin.client.prepare(&claim).await?;
    node.kill().await;
    let files = files(&node.directories.state())?;
    if files.is_empty() {
        return Ok(Outcome::NotDeclared(
            "it keeps no file in its state directory".to_owned(),
        ));
    }
    for file in &files {
        damage(file).with_context(|| format!("damage {}", file.display()))?;
    }
    let plugin = node.begin().await.context("with a damaged state file")?;
    let fresh = node.claim(&plugin, devices.get(1).unwrap_or(&devices[0]));
    plugin
        .client
        .prepare_as_kubelet(&fresh)
        .await
        .context("a new claim, after a state file was damaged")?;
    Ok(Outcome::Passed)
}

async fn state_corrupt(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    damaged(node, |file| {
        let length = std::fs::metadata(file)?.len();
        // Bytes that are no text, no number and no JSON.
        let bytes: Vec<u8> = (0..length)
            .map(|index| 0xa5 ^ u8::try_from(index % 91).unwrap_or_default())
            .collect();
        Ok(std::fs::write(file, bytes)?)
    })
    .await
}

async fn state_truncated(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    damaged(node, |file| {
        let half = std::fs::metadata(file)?.len() / 2;
        Ok(std::fs::File::options()
            .write(true)
            .open(file)?
            .set_len(half)?)
    })
    .await
}

async fn state_read_only(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let plugin = node.begin().await?;
    let devices = node.devices(&plugin).await?;
    let claim = node.claim(&plugin, &devices[0]);
    node.kill().await;
    if let Some(why) = node.start_read_only().await? {
        return Ok(Outcome::NotDeclared(why));
    }
    let answer = match node
        .registered_or_ended()
        .await
        .context("with a state directory that is read-only")?
    {
        // no error: the case is about what the driver answers afterwards
        Some(plugin) => plugin.client.prepare(&claim).await.unwrap_or_default(),
        None => Vec::new(),
    };
    node.kill().await;
    node.make_writable()?;
    let when = "with a state directory that is writable again";
    let plugin = node.begin().await.context(when)?;
    let unprepared = plugin.client.unprepare_as_kubelet(&claim).await;
    unprepared.context(when)?;
    let found = node.directories.cdi_devices()?;
    for id in answer.iter().flat_map(|device| &device.cdi_device_ids) {
        ensure!(
            !found.contains_key(id),
            "{id} of the unprepared claim, which was prepared without a state, is left"
        );
    }
    let fresh = node.claim(&plugin, devices.get(1).unwrap_or(&devices[0]));
    let prepared = plugin.client.prepare_as_kubelet(&fresh).await;
    prepared.context(when)?;
    Ok(Outcome::Passed)
}

async fn state_gone(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let (_, claim, _) = prepared(node).await?;
    node.kill().await;
    empty(&node.directories.state())?;
    let plugin = node.begin().await.context("without its state")?;
    plugin
        .client
        .unprepare_as_kubelet(&claim)
        .await
        .context("without its state")?;
    Ok(Outcome::Passed)
}

/// The regular files in a directory and below it.
fn files(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for entry in
        std::fs::read_dir(directory).with_context(|| format!("read {}", directory.display()))?
    {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_dir() {
            found.extend(files(&entry.path())?);
        } else if kind.is_file() {
            found.push(entry.path());
        }
    }
    Ok(found)
}
