//! The level `conduct`: load, deadlines, and what a driver takes.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use futures::future::join_all;
use nodedock_stand_ins::api_server::{Fault, When};
use nodedock_stand_ins::kubelet::ClaimRef;
use tokio::time::Instant;
use tonic::Code;

use super::idempotency::{prepared, same};
use super::{Facts, level};
use crate::process::{Process, Usage};
use crate::report::Outcome;
use crate::test_node::{Plugin, TestNode};
use crate::wire::{Version, failed};

level! {
    "conduct.at-once" => at_once,
    "conduct.cancelled" => cancelled,
    "conduct.api-errors" => api_errors,
    "conduct.slow-api" => slow_api,
    "conduct.quiet" => quiet,
    "conduct.memory" => memory,
    "conduct.descriptors" => descriptors,
    "conduct.memory-limit" => memory_limit,
    "conduct.values-restored" => values_restored,
    "conduct.stops" => stops,
}

const AT_ONCE: usize = 64;
/// Milliseconds after which a call is cancelled: on a busy machine the shortest ends before the driver has the call.
const CANCELLED_AFTER_MS: [u64; 10] = [1, 1, 1, 2, 4, 8, 16, 32, 64, 128];
const MEMORY_CYCLES: Cycles = Cycles {
    most: 1000,
    least: 500,
    uncounted: 100,
    checked: 100,
};
const FILES_CYCLES: Cycles = Cycles {
    most: 100,
    least: 60,
    uncounted: 10,
    checked: 20,
};
/// Time for the cycles: a case has 10 minutes, of which a start and the last calls take some.
const CYCLES_TIME: Duration = Duration::from_secs(400);
const MEMORY: Bound = Bound {
    of: |usage| usage.memory,
    max: 32 << 20,
};
const FILES: Bound = Bound {
    of: |usage| usage.files as u64,
    max: 16,
};
/// Part of the memory limit above which a driver is close to it.
const CLOSE: f64 = 0.8;
const MIB: f64 = 1_048_576.0;
/// Devices of which values and memory are compared.
const VALUES_DEVICES: usize = 8;
/// Time for which an idle driver is observed, and the number of requests that it may make.
const QUIET: Duration = Duration::from_secs(3);
const REQUESTS_MAX: usize = 10;
/// Times that are observed until one is quiet. The first has the driver's start.
const QUIET_TRIES: usize = 5;
/// Time for a driver to end after SIGTERM, as a kubelet gives it by default.
const GRACE: Duration = Duration::from_secs(30);
/// Deadline of a call while the API server does not answer.
const SHORT: Duration = Duration::from_secs(5);

async fn at_once(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let plugin = node.begin().await?;
    let devices = node.devices(&plugin).await?;
    let claims: Vec<ClaimRef> = devices
        .iter()
        .take(AT_ONCE)
        .map(|device| node.claim(&plugin, device))
        .collect();
    // Those with one device share the claim.
    let calls = (0..AT_ONCE).map(|index| {
        let (claim, client) = (claims[index % claims.len()].clone(), plugin.client.clone());
        async move {
            let answer = client
                .prepare_by(Version::V1, std::slice::from_ref(&claim))
                .await;
            (claim, answer)
        }
    });

    let (mut first, mut refused) = (BTreeMap::new(), BTreeMap::new());
    for (claim, answer) in join_all(calls).await {
        let answer = answer
            .map_err(|status| failed("prepare", &status))
            .with_context(|| format!("of {AT_ONCE} prepares at once"))?;
        match answer.of(&claim) {
            Ok(answer) => {
                let known = first
                    .entry(claim.uid.clone())
                    .or_insert_with(|| answer.clone());
                same(known, &answer, "of another call at the same time")?;
            }
            Err(error) => {
                refused.entry(claim.uid.clone()).or_insert((claim, error));
            }
        }
    }
    ensure!(
        !first.is_empty(),
        "none of {AT_ONCE} prepares at once succeeds"
    );
    for (uid, (claim, error)) in refused {
        // Claims for devices that overlap exclude each other, of which slices do not say everything. The others are prepared still, so
        // that one that is excluded is refused now too.
        if first.contains_key(&uid) || plugin.client.prepare(&claim).await.is_ok() {
            return Err(error.context(format!(
                "of {AT_ONCE} prepares at once, a claim is refused that another call prepares"
            )));
        }
    }
    Ok(Outcome::Passed)
}

async fn cancelled(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let plugin = node.begin().await?;
    let devices = node.devices(&plugin).await?;
    let claim = node.claim(&plugin, &devices[0]);
    for milliseconds in CANCELLED_AFTER_MS {
        let call = plugin.client.prepare(&claim);
        // Dropped, it resets its stream.
        let _ = tokio::time::timeout(Duration::from_millis(milliseconds), call).await;
    }
    // One that is under way still may be in their way for a while.
    let prepared = plugin.client.prepare_as_kubelet(&claim).await;
    prepared.context("after calls that were cancelled")?;
    let unprepared = plugin.client.unprepare_as_kubelet(&claim).await;
    unprepared.context("after calls that were cancelled")?;
    Ok(Outcome::Passed)
}

/// Prepares while the API server does not work, with a deadline, and after it. Answers whether the driver has answered the first.
async fn without_api(node: &mut TestNode, fault: Fault, deadline: Duration) -> Result<bool> {
    let plugin = node.begin().await?;
    let devices = node.devices(&plugin).await?;
    let claim = node.claim(&plugin, &devices[0]);
    let fault = node.api.fail(fault, When::any().resource("resourceclaims"));
    // It may have read the claim before: then it can prepare it.
    let answer = plugin
        .client
        .within(deadline)
        .prepare_by(Version::V1, std::slice::from_ref(&claim))
        .await;
    node.api.lift(fault);
    let answer_after = plugin
        .client
        .prepare_as_kubelet(&claim)
        .await
        .context("when the API server works again")?;
    ensure!(
        !answer_after.is_empty(),
        "the answer has no device when the API server works again"
    );
    plugin
        .client
        .unprepare_as_kubelet(&claim)
        .await
        .context("when the API server works again")?;
    Ok(!answer
        .is_err_and(|status| matches!(status.code(), Code::DeadlineExceeded | Code::Cancelled)))
}

async fn api_errors(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let deadline = node.options.call_timeout;
    let is_answered = without_api(node, Fault::Status(500), deadline).await?;
    ensure!(
        is_answered,
        "while the API server answers 500, a prepare is not answered within {deadline:?}"
    );
    Ok(Outcome::Passed)
}

async fn slow_api(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    // The caller ends the call at its deadline if the driver does not.
    without_api(node, Fault::Hang, SHORT).await?;
    Ok(Outcome::Passed)
}

async fn quiet(node: &mut TestNode, facts: &Facts) -> Result<Outcome> {
    let plugin = node.begin().await?;
    if facts.publishes {
        node.slices(&plugin.name).await;
    }
    let mut count = 0;
    for _ in 0..QUIET_TRIES {
        tokio::time::sleep(QUIET).await;
        count = node.api.requests().len();
        if count <= REQUESTS_MAX {
            return Ok(Outcome::Passed);
        }
        // On a busy machine it may still be starting.
        node.api.forget_requests();
    }
    bail!("{count} requests in {QUIET:?} without work, {REQUESTS_MAX} at most");
}

/// The repetitions of unprepare and prepare of a claim.
struct Cycles {
    /// Maximum number of cycles; fewer run if time is short.
    most: usize,
    /// Fewer say nothing.
    least: usize,
    /// Number of first cycles, in which the driver's usage may grow.
    uncounted: usize,
    /// Number of cycles after which the growth is looked at again: with little of it the rest would say nothing new.
    checked: usize,
}

/// What a driver takes too much of.
struct Bound {
    of: fn(&Usage) -> u64,
    /// Growth from which on it is too much.
    max: u64,
}

impl Cycles {
    /// Returns the driver's usage after the uncounted cycles and after the last one, or the reason why it is unknown.
    async fn run(
        &self,
        node: &mut TestNode,
        time: Duration,
        bound: &Bound,
    ) -> Result<Result<[Usage; 2], Outcome>> {
        let (plugin, claim, _) = prepared(node).await?;
        let quiet: Plugin = Plugin {
            client: plugin.client.quiet(),
            ..plugin
        };
        let end = Instant::now() + time;
        let (mut done, mut before) = (0, None);
        while done < self.most && Instant::now() < end {
            quiet
                .client
                .unprepare(&claim)
                .await
                .with_context(|| format!("in cycle {done}"))?;
            quiet
                .client
                .prepare(&claim)
                .await
                .with_context(|| format!("in cycle {done}"))?;
            done += 1;
            if done == self.uncounted {
                before = usage(node).map(|usage| (done, usage));
            } else if done.is_multiple_of(self.checked)
                && let (Some((since, first)), Some(after)) = (before, usage(node))
            {
                if self.is_clear(done - since, bound.growth(&first, &after), bound.max) {
                    node.log
                        .add(format!("{done} cycles of prepare and unprepare say enough"));
                    return Ok(Ok([first, after]));
                }
                // What is returned after the first cycles must not hide a leak.
                if (bound.of)(&after) < (bound.of)(&first) {
                    before = Some((done, after));
                }
            }
        }
        node.log
            .add(format!("{done} cycles of prepare and unprepare"));
        let before = before.map(|(_, usage)| usage);
        Ok(self.known(done, time, before, usage(node)))
    }

    /// Returns whether the growth, continued to the last cycle, would stay below half of the maximum. At least twice the uncounted cycles
    /// have to be counted.
    fn is_clear(&self, counted: usize, grown: u64, max: u64) -> bool {
        let all = self.most - self.uncounted;
        let [counted_share, all_share] = [counted, all].map(|cycles| cycles as u64);
        counted >= 2 * self.uncounted && 2 * grown * all_share < max * counted_share
    }

    fn known(
        &self,
        done: usize,
        time: Duration,
        before: Option<Usage>,
        after: Option<Usage>,
    ) -> Result<[Usage; 2], Outcome> {
        if done < self.least {
            let why = format!("{done} cycles took {time:?}, and {} are needed", self.least);
            return Err(Outcome::NotDeclared(why));
        }
        before.zip(after).map(<[Usage; 2]>::from).ok_or_else(|| {
            Outcome::NotDeclared("what its processes take cannot be read".to_owned())
        })
    }
}

impl Bound {
    fn growth(&self, before: &Usage, after: &Usage) -> u64 {
        (self.of)(after).saturating_sub((self.of)(before))
    }
}

fn usage(node: &TestNode) -> Option<Usage> {
    node.process.as_ref().and_then(Process::usage)
}

async fn memory(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let [before, after] = match MEMORY_CYCLES.run(node, CYCLES_TIME, &MEMORY).await? {
        Ok(usage) => usage,
        Err(unknown) => return Ok(unknown),
    };
    let grown = MEMORY.growth(&before, &after);
    ensure!(
        grown < MEMORY.max,
        "it grows by {} KiB, from {} KiB",
        grown >> 10,
        before.memory >> 10
    );
    Ok(Outcome::Passed)
}

async fn descriptors(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let [before, after] = match FILES_CYCLES.run(node, CYCLES_TIME, &FILES).await? {
        Ok(usage) => usage,
        Err(unknown) => return Ok(unknown),
    };
    let grown = FILES.growth(&before, &after);
    ensure!(
        grown < FILES.max,
        "{grown} more files are open, {} before",
        before.files
    );
    Ok(Outcome::Passed)
}

async fn memory_limit(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let plugin = node.begin().await?;
    let devices = node.devices(&plugin).await?;
    for device in devices.iter().take(VALUES_DEVICES) {
        let claim = node.claim(&plugin, device);
        if plugin.client.prepare(&claim).await.is_ok() {
            plugin.client.unprepare(&claim).await?;
        }
    }
    let daemon = node.daemon().await?;
    let peak = daemon.metric("nodedock_driver_memory_peak_bytes").await?;
    let limit = daemon.metric("nodedock_driver_memory_limit_bytes").await?;
    ensure!(
        limit > 0.0,
        "the daemon does not say which memory a call may have"
    );
    ensure!(
        peak <= limit * CLOSE,
        "a call took {:.0} of {:.0} MiB: raise limits.memoryMiB, or take less",
        peak / MIB,
        limit / MIB
    );
    Ok(Outcome::Passed)
}

async fn values_restored(node: &mut TestNode, _: &Facts) -> Result<Outcome> {
    let plugin = node.begin().await?;
    let devices = node.devices(&plugin).await?;
    for device in devices.iter().take(VALUES_DEVICES) {
        let claim = node.claim(&plugin, device);
        // A device may be in use on this machine. What a failed prepare has left is restored by the host.
        if plugin.client.prepare(&claim).await.is_ok() {
            plugin.client.unprepare(&claim).await?;
        }
    }
    let left = node
        .daemon()
        .await?
        .metric("nodedock_sysfs_values_left_total")
        .await?;
    ensure!(
        left == 0.0,
        "unprepare left {left} values below /sys as the prepare had written them, and the host restored them: see value-left in the driver's output"
    );
    Ok(Outcome::Passed)
}

async fn stops(node: &mut TestNode, facts: &Facts) -> Result<Outcome> {
    match facts.is_dra {
        true => drop(node.begin().await?),
        false => {
            node.start()?;
            node.device_plugin().await?;
        }
    }
    node.stop_within(GRACE).await?;
    Ok(Outcome::Passed)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_need_the_minimum_of_cycles() {
        let usage = |memory| Some(Usage { memory, files: 1 });
        let known = |done| MEMORY_CYCLES.known(done, CYCLES_TIME, usage(1), usage(2));
        for done in [500, 666, 1000] {
            assert_eq!(known(done).unwrap().map(|usage| usage.memory), [1, 2]);
        }
        let why = "499 cycles took 400s, and 500 are needed".to_owned();
        assert_eq!(known(499).unwrap_err(), Outcome::NotDeclared(why));
        assert!(
            MEMORY_CYCLES
                .known(1000, CYCLES_TIME, usage(1), None)
                .is_err()
        );
        assert!(
            [MEMORY_CYCLES, FILES_CYCLES]
                .iter()
                .all(|cycles| cycles.uncounted < cycles.least)
        );
    }

    #[test]
    fn clear_growth_ends_cycles_early() {
        let (mib, max) = (1 << 20, MEMORY.max);
        // A leak at the bound adds 7.1 MiB in 200 of 900 cycles.
        for (done, grown, expected) in [
            (200, 0, false),
            (300, 0, true),
            (300, 3 * mib, true),
            (300, 4 * mib, false),
            (300, 7 * mib, false),
            (600, 7 * mib, true),
            (1000, 15 * mib, true),
            (1000, 16 * mib, false),
        ] {
            assert_eq!(
                MEMORY_CYCLES.is_clear(done - MEMORY_CYCLES.uncounted, grown, max),
                expected,
                "{done} {grown}"
            );
        }
        for (done, grown, expected) in [(20, 0, false), (40, 2, true), (40, 3, false)] {
            let counted = done - FILES_CYCLES.uncounted;
            assert_eq!(FILES_CYCLES.is_clear(counted, grown, FILES.max), expected);
        }
        let [before, after] = [(40, 7), (30, 9)].map(|(memory, files)| Usage { memory, files });
        assert_eq!(MEMORY.growth(&before, &after), 0);
        assert_eq!(FILES.growth(&before, &after), 2);
    }
}
