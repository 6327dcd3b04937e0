//! The level `slices`: what a driver publishes.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use nodedock_stand_ins::api_server::Seen;
use serde_json::Value;
use tokio::time::Instant;

use super::{Facts, level};
use crate::published::{DeviceId, is_complete};
use crate::report::Outcome;
use crate::test_node::{NODE, Plugin, TestNode};

level! {
    "slices.accepted" => accepted,
    "slices.node" => node,
    "slices.owner" => owner,
    "slices.complete" => complete,
    "slices.unique" => unique,
    "slices.names-stable" => names_stable,
    "slices.reboot-names" => reboot_names,
    "slices.later-discovery" => later_discovery,
    "slices.kept" => kept,
    "slices.quiet-restart" => quiet_restart,
    "slices.wiped" => wiped,
    "slices.repaired" => repaired,
    "slices.generation" => generation,
    "slices.one-write" => one_write,
}

/// Deadline for a driver to restore its slices.
const REPAIR: Duration = Duration::from_secs(30);
/// Time in which a driver whose slices are as desired writes nothing more.
const SETTLE: Duration = Duration::from_secs(2);

/// Deadline for a driver to be quiet.
const SETTLED: Duration = Duration::from_secs(10);
/// Interval of looking at the requests.
const LOOK: Duration = Duration::from_millis(100);

/// Waits until the driver has asked nothing of the API server for some time: on a busy machine its writes come late, one after another.
async fn until_quiet(node: &TestNode) {
    let end = Instant::now() + SETTLED;
    let count = || node.api.look(|state| state.requests().len());
    let (mut seen, mut since) = (count(), Instant::now());
    while since.elapsed() < SETTLE && Instant::now() < end {
        tokio::time::sleep(LOOK).await;
        let now = count();
        if now != seen {
            (seen, since) = (now, Instant::now());
        }
    }
}

/// The driver with its slices, which are there.
async fn published(node: &mut TestNode) -> Result<(Plugin, Vec<Value>)> {
    let plugin = node.begin().await?;
    let time = node.options.slices_timeout;
    let slices = node
        .slices_until(&plugin.name, time, |slices| !slices.is_empty())
        .await;
    Ok((
        plugin,
        slices.with_context(|| format!("no slice is published within {time:?}"))?,
    ))
}

/// The driver with all that it publishes.
pub(super) async fn settled(node: &mut TestNode) -> Result<(Plugin, Vec<Value>)> {
    let plugin = node.begin().await?;
    let slices = node.slices(&plugin.name).await;
    ensure!(
        !slices.is_empty(),
        "its pools are not complete within {:?}",
        node.options.slices_timeout
    );
    Ok((plugin, slices))
}

/// All devices of slices, also those that cannot be allocated.
pub(super) fn names(slices: &[Value]) -> Vec<DeviceId> {
    let mut names = Vec::new();
    for slice in slices {
        let pool = slice["spec"]["pool"]["name"].as_str().unwrap_or_default();
        for device in slice["spec"]["devices"].as_array().into_iter().flatten() {
            let name = device["name"].as_str().unwrap_or_default().to_owned();
            names.push(DeviceId {
                pool: pool.to_owned(),
                name,
            });
        }
    }
    names.sort();
    names
}

fn writes(node: &TestNode) -> Vec<Seen> {
    node.api
        .requests()
        .into_iter()
        .filter(|seen| {
            seen.resource == "resourceslices"
                && matches!(
                    seen.verb.as_str(),
                    "create" | "update" | "patch" | "delete" | "deletecollection"
                )
        })
        .collect()
}

/// Returns whether the API server has a slice or has seen the driver write one.
pub(super) fn are_written(node: &TestNode) -> bool {
    let has_some = node
        .api
        .look(|state| !state.objects("resourceslices").is_empty());
    has_some
        || writes(node)
            .iter()
            .any(|seen| !seen.verb.starts_with("delete"))
}

fn named(writes: &[Seen]) -> Vec<String> {
    writes
        .iter()
        .map(|seen| format!("{} {}", seen.verb, seen.name))
        .collect()
}

async fn accepted(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let plugin = node.begin().await?;
    node.slices(&plugin.name).await;
    until_quiet(node).await;
    ensure!(
        are_written(node),
        "no slice is written within {:?}",
        node.options.slices_timeout
    );
    for seen in writes(node) {
        ensure!(
            !matches!(seen.code, 400 | 422),
            "the API server refuses {} {} with {}",
            seen.verb,
            seen.path,
            seen.code
        );
    }
    Ok(Outcome::Passed)
}

async fn node(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    // The driver runs under its own name: slices under another name would not be recognized as its own.
    let plugin = node.begin().await?;
    let slices = node
        .slices_until(&plugin.name, node.options.slices_timeout, |slices| {
            !slices.is_empty()
        })
        .await;
    ensure!(
        slices.is_some(),
        "no slice has the driver's name {:?}",
        plugin.name
    );
    for slice in node.api.look(|state| {
        state
            .objects("resourceslices")
            .into_iter()
            .cloned()
            .collect::<Vec<_>>()
    }) {
        let (name, spec) = (&slice["metadata"]["name"], &slice["spec"]);
        ensure!(
            spec["nodeName"] == NODE,
            "slice {name} is for node {}, not {NODE:?}",
            spec["nodeName"]
        );
        ensure!(
            spec["driver"] == plugin.name.as_str(),
            "slice {name} has the driver {}, not {:?}",
            spec["driver"],
            plugin.name
        );
    }
    Ok(Outcome::Passed)
}

async fn owner(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let (_, slices) = published(node).await?;
    for slice in slices {
        let (name, owners) = (
            &slice["metadata"]["name"],
            &slice["metadata"]["ownerReferences"],
        );
        ensure!(
            owners
                .as_array()
                .into_iter()
                .flatten()
                .any(|owner| owner["kind"] == "Node" && owner["name"] == NODE),
            "slice {name} has the owners {owners}"
        );
    }
    Ok(Outcome::Passed)
}

async fn complete(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let (plugin, _) = published(node).await?;
    let is_whole = node
        .slices_until(&plugin.name, node.options.slices_timeout, is_complete)
        .await;
    if is_whole.is_none() {
        let pools: Vec<_> = node
            .slices_now(&plugin.name)
            .iter()
            .map(|slice| slice["spec"]["pool"].to_string())
            .collect();
        anyhow::bail!("the pools of its slices are {}", pools.join(", "));
    }
    Ok(Outcome::Passed)
}

async fn unique(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let (_, slices) = settled(node).await?;
    let mut known = BTreeSet::new();
    for device in names(&slices) {
        let text = format!("{}/{}", device.pool, device.name);
        ensure!(known.insert(device), "{text} is there twice");
    }
    Ok(Outcome::Passed)
}

/// A cause for which a driver looks for its devices again.
#[derive(Debug, Clone, Copy)]
enum Again {
    Restart,
    Reboot,
    Discovery,
}

impl Again {
    fn as_str(self) -> &'static str {
        match self {
            Self::Restart => "after a restart",
            Self::Reboot => "after a reboot",
            Self::Discovery => "after another discovery",
        }
    }

    /// Has the driver look again. Answers why that is not possible here.
    async fn happen(self, node: &mut TestNode, plugin: Plugin) -> Result<Result<Plugin, String>> {
        match self {
            Self::Restart => Ok(Ok(node.restart().await?)),
            Self::Reboot => match node.reboot().await? {
                Some(why) => Ok(Err(why)),
                None => Ok(Ok(node.begin().await.context("after a reboot")?)),
            },
            Self::Discovery => {
                node.daemon().await?.discover(&plugin.name).await?;
                Ok(Ok(plugin))
            }
        }
    }
}

/// Compares the pools and devices before and after. A pool of a slow driver may have been missing before, and is there the second time.
async fn same_names(node: &mut TestNode, again: Again) -> Result<Outcome> {
    let (mut plugin, slices) = settled(node).await?;
    let (when, mut before) = (again.as_str(), names(&slices));
    for is_last in [false, true] {
        plugin = match again.happen(node, plugin).await? {
            Ok(plugin) => plugin,
            Err(why) => return Ok(Outcome::NotDeclared(why)),
        };
        let after = names_after(node, &plugin, &before, when).await?;
        if after == before {
            return Ok(Outcome::Passed);
        }
        ensure!(
            !is_last && has_all(&after, &before),
            "the devices were {before:?}, and are {when} {after:?}"
        );
        before = after;
    }
    Ok(Outcome::Passed)
}

/// The pools and devices of a driver that looks again, once those from before are there and nothing changes.
async fn names_after(
    node: &TestNode,
    plugin: &Plugin,
    before: &[DeviceId],
    when: &str,
) -> Result<Vec<DeviceId>> {
    // It may write at once, or when it has looked.
    until_quiet(node).await;
    let time = node.options.slices_timeout;
    let is_back = |slices: &[Value]| is_complete(slices) && has_all(&names(slices), before);
    let slices = match node.slices_until(&plugin.name, time, is_back).await {
        Some(_) => node.slices(&plugin.name).await,
        None => node.slices_now(&plugin.name),
    };
    ensure!(is_complete(&slices), "{when} its pools are not complete");
    Ok(names(&slices))
}

fn has_all(devices: &[DeviceId], wanted: &[DeviceId]) -> bool {
    wanted.iter().all(|device| devices.contains(device))
}

async fn names_stable(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    same_names(node, Again::Restart).await
}

async fn reboot_names(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    same_names(node, Again::Reboot).await
}

async fn later_discovery(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    same_names(node, Again::Discovery).await
}

/// The writes of a restart. One that finds pools which were not published before is repeated: a slow driver was not done.
async fn restarted(node: &mut TestNode) -> Result<Vec<Seen>> {
    let (plugin, slices) = settled(node).await?;
    let before = names(&slices);
    let (first, after) = writes_of_restart(node, &plugin).await?;
    if after.len() > before.len() && has_all(&after, &before) {
        return Ok(writes_of_restart(node, &plugin).await?.0);
    }
    Ok(first)
}

/// The writes of one restart, and the devices after it.
async fn writes_of_restart(
    node: &mut TestNode,
    plugin: &Plugin,
) -> Result<(Vec<Seen>, Vec<DeviceId>)> {
    node.api.forget_requests();
    node.restart().await?;
    until_quiet(node).await;
    Ok((writes(node), names(&node.slices_now(&plugin.name))))
}

async fn kept(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let writes = restarted(node).await?;
    let deletes = writes.iter().any(|seen| seen.verb.starts_with("delete"));
    ensure!(!deletes, "a restart does {:?}", named(&writes));
    Ok(Outcome::Passed)
}

async fn quiet_restart(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let writes = restarted(node).await?;
    ensure!(writes.is_empty(), "a restart does {:?}", named(&writes));
    Ok(Outcome::Passed)
}

async fn wipe(node: &TestNode, plugin: &Plugin, slices: &[Value]) -> Result<Vec<Value>> {
    node.log.add("all slices of the node are deleted");
    node.api.kubelet_starts(NODE);
    node.slices_until(&plugin.name, REPAIR, |found| {
        is_complete(found) && names(found) == names(slices)
    })
    .await
    .context("deleted slices are not published again within 30 s")
}

async fn wiped(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let (plugin, slices) = settled(node).await?;
    wipe(node, &plugin, &slices).await?;
    Ok(Outcome::Passed)
}

/// The first slice that has devices.
fn with_devices(slices: &[Value]) -> Result<&Value> {
    slices
        .iter()
        .find(|slice| {
            slice["spec"]["devices"]
                .as_array()
                .is_some_and(|list| !list.is_empty())
        })
        .context("no slice has a device")
}

/// Takes a device out of a slice and waits until it is back.
async fn repair(node: &TestNode, plugin: &Plugin, slices: &[Value]) -> Result<Vec<Value>> {
    let name = with_devices(slices)?["metadata"]["name"]
        .as_str()
        .context("a slice has no name")?;
    node.log
        .add(format!("a device is removed from slice {name}"));
    node.api.edit("resourceslices", "", name, |slice| {
        slice["spec"]["devices"].as_array_mut().map(Vec::pop);
    });
    node.slices_until(&plugin.name, REPAIR, |found| {
        is_complete(found) && names(found) == names(slices)
    })
    .await
    .context("a changed slice is not brought back within 30 s")
}

async fn repaired(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let (plugin, slices) = settled(node).await?;
    repair(node, &plugin, &slices).await?;
    Ok(Outcome::Passed)
}

/// The newest generation of each pool.
fn generations(slices: &[Value]) -> BTreeMap<String, i64> {
    let mut newest = BTreeMap::new();
    for slice in slices {
        let pool = &slice["spec"]["pool"];
        let generation = pool["generation"].as_i64().unwrap_or_default();
        let known = newest
            .entry(pool["name"].as_str().unwrap_or_default().to_owned())
            .or_insert(generation);
        *known = generation.max(*known);
    }
    newest
}

fn never_lower(before: &[Value], after: &[Value], when: &str) -> Result<()> {
    let after = generations(after);
    for (pool, generation) in generations(before) {
        let now = after.get(&pool).copied().unwrap_or(generation);
        ensure!(
            now >= generation,
            "pool {pool} had the generation {generation}, and {when} {now}"
        );
    }
    Ok(())
}

async fn generation(node: &mut TestNode, facts: &Facts) -> Result<Outcome> {
    let (plugin, slices) = settled(node).await?;
    repair(node, &plugin, &slices).await?;
    // A driver may write a pool more than once, and the raise is to meet none of these writes.
    until_quiet(node).await;
    let mut before = node.slices_now(&plugin.name);
    never_lower(&slices, &before, "after a repair")?;
    // Another client raises it: what is below is not used.
    let pool = before[0]["spec"]["pool"]["name"].clone();
    for slice in before
        .iter_mut()
        .filter(|slice| slice["spec"]["pool"]["name"] == pool)
    {
        let name = slice["metadata"]["name"]
            .as_str()
            .unwrap_or_default()
            .to_owned();
        let raised = slice["spec"]["pool"]["generation"]
            .as_i64()
            .unwrap_or_default()
            + 5;
        slice["spec"]["pool"]["generation"] = raised.into();
        node.api.edit("resourceslices", "", &name, |slice| {
            slice["spec"]["pool"]["generation"] = raised.into()
        });
    }
    node.log
        .add(format!("the generation of pool {pool} is raised by 5"));
    let after = repair(node, &plugin, &before).await?;
    never_lower(
        &before,
        &after,
        "after a repair of a pool whose generation another client has raised",
    )?;
    if facts.is_program {
        node.restart().await?;
        until_quiet(node).await;
        never_lower(&after, &node.slices_now(&plugin.name), "after a restart")?;
    }
    Ok(Outcome::Passed)
}

/// Names of the slices of other pools.
fn of_other_pools(slices: &[Value], pool: &Value) -> Vec<String> {
    let others = slices
        .iter()
        .filter(|slice| slice["spec"]["pool"]["name"] != *pool);
    let names = others.filter_map(|slice| slice["metadata"]["name"].as_str());
    names.map(str::to_owned).collect()
}

async fn one_write(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let (plugin, slices) = settled(node).await?;
    let pool = &with_devices(&slices)?["spec"]["pool"]["name"];
    let most = slices
        .iter()
        .filter(|slice| slice["spec"]["pool"]["name"] == *pool)
        .count();
    node.api.forget_requests();
    repair(node, &plugin, &slices).await?;
    until_quiet(node).await;
    let mut writes = writes(node);
    // A slow driver may not have been done with another pool.
    let of_others = of_other_pools(&node.slices_now(&plugin.name), pool);
    writes.retain(|seen| !of_others.contains(&seen.name));
    // A write that met a newer version is repeated.
    let count = writes.iter().filter(|seen| seen.code != 409).count();
    ensure!(
        count <= most,
        "one change of {most} slices leads to {count} writes: {:?}",
        named(&writes)
    );
    Ok(Outcome::Passed)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn slice(name: &str, pool: &str, devices: &[&str]) -> Value {
        let devices: Vec<_> = devices.iter().map(|name| json!({ "name": name })).collect();
        json!({ "metadata": { "name": name }, "spec": { "pool": { "name": pool }, "devices": devices } })
    }

    #[test]
    fn missing_devices_are_seen() {
        let few = names(&[slice("s", "p", &["a", "b"])]);
        let more = names(&[slice("s", "p", &["b", "a"]), slice("t", "q", &["a"])]);
        assert!(has_all(&more, &few) && !has_all(&few, &more));
        assert!(!has_all(&names(&[slice("s", "other", &["a", "b"])]), &few));
    }

    #[test]
    fn slices_of_other_pools_are_named() {
        let slices = [
            slice("s", "p", &[]),
            slice("t", "q", &[]),
            slice("u", "p", &[]),
        ];
        assert_eq!(of_other_pools(&slices, &json!("p")), ["t"]);
        assert_eq!(of_other_pools(&slices, &json!("q")), ["s", "u"]);
    }
}
