//! The state of a claim, its problems, what happens next, and its history.

use std::collections::BTreeMap;

use anyhow::Result;
use nodedock_proto::node::v1;
use serde::Serialize;

use super::history;
use crate::client::Client;
use crate::get::add_objects;
use crate::output::{Format, join, print};
use crate::{Location, describe, local_api, names, waiting};
use nodedock_base::clock::{now_ms, rfc3339};

pub(super) async fn claim(
    location: &Location,
    mut client: Client,
    name: &str,
    format: Format,
) -> Result<()> {
    let mut answer = client
        .list_claims(names::claims_and_ended(name, true))
        .await?
        .into_inner();
    let mut objects = local_api::claims(location).await?;
    let created = objects.iter().map(|object| {
        ["/metadata/uid", "/metadata/creationTimestamp"]
            .map(|field| local_api::text(object, field).to_owned())
    });
    let created = created.map(|[uid, created]| (uid, created)).collect();
    objects.retain(|object| {
        let uid = local_api::text(object, "/metadata/uid");
        let waiting = answer.waiting.iter().filter_map(|of| of.id.as_ref());
        !waiting.into_iter().any(|id| id.uid == uid)
    });
    add_objects(&mut answer.claims, &objects, name);
    let v1::ListClaimsResponse {
        claims,
        refused,
        released,
        waiting,
        ended,
    } = &answer;
    // A name may have had many claims: the one that is here is meant.
    let ended = if claims.is_empty() {
        ended.as_slice()
    } else {
        &[]
    };
    let is_unknown = claims.is_empty() && refused.is_empty() && released.is_empty();
    if is_unknown && waiting.is_empty() && ended.is_empty() {
        return Err(names::unknown("claim", name));
    }
    let explained = Explained {
        claims: claims.iter().map(Claim::new).collect(),
        refused,
        released,
        waiting,
        ended,
        created,
    };
    print(format, &explained, || join(explained.lines(now_ms())))
}

/// All claims of a name that the daemon knows of.
#[derive(Serialize)]
struct Explained<'a> {
    claims: Vec<Claim<'a>>,
    /// Refused and rolled back.
    refused: &'a [v1::RefusedClaim],
    /// Released by an operator.
    released: &'a [v1::ReleasedClaim],
    /// Claims of the local API that are not allocated.
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    waiting: &'a [v1::WaitingClaim],
    /// Unprepared within the last day.
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    ended: &'a [v1::EndedClaim],
    /// Times at which claims of the local API were made, by UID.
    #[serde(skip)]
    created: BTreeMap<String, String>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Claim<'a> {
    #[serde(flatten)]
    id: &'a Option<v1::ObjectRef>,
    state: &'a str,
    /// None: from before the oldest entry of the timeline.
    since: Option<String>,
    stale_boot: bool,
    pods: &'a [v1::ObjectRef],
    #[serde(skip_serializing_if = "Option::is_none")]
    kubelet: Option<&'a v1::KubeletHold>,
    drivers: &'a [v1::ClaimDriver],
    values: &'a [v1::SysfsValue],
    next: Vec<String>,
    timeline: &'a [v1::Transition],
}

impl Explained<'_> {
    fn lines(&self, now_ms: u64) -> Vec<String> {
        let claims = self.claims.iter().flat_map(|claim| claim.lines(now_ms));
        let refused = self
            .refused
            .iter()
            .flat_map(|refused| refused_lines(refused, now_ms));
        let released = self
            .released
            .iter()
            .flat_map(|released| released_lines(released, now_ms));
        let waiting = self.waiting.iter().flat_map(|waiting| {
            let uid = waiting.id.as_ref().map(|id| id.uid.as_str());
            let created = uid.and_then(|uid| self.created.get(uid));
            waiting::lines(waiting, created.map_or("", String::as_str))
        });
        waiting
            .chain(claims)
            .chain(refused)
            .chain(released)
            .chain(
                self.ended
                    .iter()
                    .flat_map(|ended| ended_lines(ended, now_ms)),
            )
            .collect()
    }
}

impl<'a> Claim<'a> {
    fn new(claim: &'a v1::ClaimStatus) -> Self {
        let v1::ClaimStatus {
            id,
            state,
            pods,
            drivers,
            timeline,
            stale_boot,
            values,
            kubelet,
            ..
        } = claim;
        let since = since(state, timeline).map(rfc3339);
        let next = drivers
            .iter()
            .filter_map(|driver| next_step(id.as_ref()?, driver))
            .collect();
        let (stale_boot, kubelet) = (*stale_boot, kubelet.as_ref());
        Self {
            id,
            state,
            since,
            stale_boot,
            pods,
            kubelet,
            drivers,
            values,
            next,
            timeline,
        }
    }

    fn lines(&self, now_ms: u64) -> Vec<String> {
        let since = since(self.state, self.timeline);
        let since =
            since.map(|at| format!(" since {} ({})", rfc3339(at), describe::elapsed(at, now_ms)));
        let id = self.id.as_ref().map(describe::object).unwrap_or_default();
        let mut lines = vec![format!(
            "claim {id} is {}{}",
            describe::claim_state(self.state, self.stale_boot),
            since.unwrap_or_default()
        )];
        if self.stale_boot {
            lines.push(
                "  prepared in an earlier boot; preparing its pod prepares it again".to_owned(),
            );
        }
        lines.extend(pod_lines(self.pods));
        lines.extend(
            self.kubelet
                .map(|hold| format!("  {}", describe::kubelet_hold(hold))),
        );
        lines.extend(self.drivers.iter().flat_map(claim_driver_lines));
        lines.extend(
            self.values
                .iter()
                .map(|value| format!("  {}", describe::sysfs_value(value))),
        );
        lines.extend(self.next.iter().map(|next| format!("  next: {next}")));
        lines.extend(history(self.timeline));
        lines
    }
}

fn claim_driver_lines(driver: &v1::ClaimDriver) -> Vec<String> {
    let version = match driver.version.as_str() {
        "" => String::new(),
        version => format!(" by version {version}"),
    };
    let (name, state, devices) = (&driver.driver, &driver.state, driver.devices.join(", "));
    let mut lines = vec![format!("  driver {name}: {state}{version}: {devices}")];
    lines.extend(driver.gone_devices.iter().map(|device| {
        format!("    device {device} is gone: the driver does not have it any more")
    }));
    lines.extend(
        driver
            .cdi_devices
            .iter()
            .map(|name| format!("    CDI device {name}")),
    );
    lines.extend(describe::problem(&driver.problem, "    "));
    if driver.attempts > 0 {
        let attempts = describe::count(driver.attempts, "failed attempt");
        lines.push(format!("    {attempts} since the daemon started"));
    }
    lines
}

fn refused_lines(refused: &v1::RefusedClaim, now_ms: u64) -> Vec<String> {
    let claim = refused
        .id
        .as_ref()
        .map(describe::object)
        .unwrap_or_default();
    let (at, passed) = (
        rfc3339(refused.at_ms),
        describe::elapsed(refused.at_ms, now_ms),
    );
    let v1::RefusedClaim {
        driver, attempts, ..
    } = refused;
    let mut lines = vec![format!(
        "claim {claim} was refused by driver {driver} on {at} ({passed} ago), after {}",
        describe::count(*attempts, "attempt")
    )];
    lines.extend(describe::problem(&refused.problem, "  "));
    lines.push("  it was rolled back".to_owned());
    lines.extend(
        refused
            .retry
            .as_ref()
            .map(|retry| format!("  next: {}", next_prepare(driver, retry))),
    );
    lines
}

fn released_lines(released: &v1::ReleasedClaim, now_ms: u64) -> Vec<String> {
    let claim = released
        .id
        .as_ref()
        .map(describe::object)
        .unwrap_or_default();
    let (at, passed) = (
        rfc3339(released.at_ms),
        describe::elapsed(released.at_ms, now_ms),
    );
    let by = describe::caller(released.by.as_ref().unwrap_or(&v1::Caller::default()));
    let mut lines = vec![format!(
        "claim {claim} was released on {at} ({passed} ago) by {by}"
    )];
    lines.extend(pod_lines(&released.pods));
    if released.untold.is_empty() {
        lines.push("  every driver unprepared it".to_owned());
    }
    for v1::UntoldDriver {
        driver,
        devices,
        problem,
    } in &released.untold
    {
        let devices = devices.join(", ");
        lines.push(format!(
            "  driver {driver} did not unprepare it, and may still use {devices}"
        ));
        lines.extend(describe::problem(problem, "    "));
    }
    lines.extend(
        released
            .values
            .iter()
            .map(|value| format!("  {}", describe::sysfs_value(value))),
    );
    lines.extend(history(&released.timeline));
    lines
}

fn ended_lines(ended: &v1::EndedClaim, now_ms: u64) -> Vec<String> {
    let claim = ended.id.as_ref().map(describe::object).unwrap_or_default();
    let (at, passed) = (rfc3339(ended.at_ms), describe::elapsed(ended.at_ms, now_ms));
    let mut lines = vec![format!(
        "claim {claim} was unprepared on {at} ({passed} ago)"
    )];
    let pods = ended.pods.iter().map(describe::object);
    lines.extend(pods.map(|pod| format!("  last in use by pod {pod}")));
    let devices = ended.devices.iter();
    lines.extend(devices.map(|device| format!("  had device {device}")));
    lines.extend(history(&ended.timeline));
    lines
}

fn pod_lines(pods: &[v1::ObjectRef]) -> impl Iterator<Item = String> {
    pods.iter()
        .map(|pod| format!("  in use by pod {}", describe::object(pod)))
}

/// Returns the time at which a claim entered its state: that of the newest entry that begins the state and that no later entry leaves.
fn since(state: &str, timeline: &[v1::Transition]) -> Option<u64> {
    let begin = match state {
        // Each repeated request is an entry of its own: the first after another state counts.
        "preparing" => {
            let from = timeline
                .iter()
                .rposition(|entry| matches!(entry.what.as_str(), "prepared" | "unpreparing"))
                .map_or(0, |at| at + 1);
            timeline[from..].iter().find(|entry| begins(entry, state))
        }
        _ => timeline.iter().rev().find(|entry| begins(entry, state)),
    };
    begin.map(|entry| entry.at_ms)
}

fn begins(entry: &v1::Transition, state: &str) -> bool {
    match state {
        "unpreparing" => matches!(entry.what.as_str(), "unpreparing" | "rolled back"),
        "prepared" => entry.what == "prepared",
        _ => entry.what.starts_with("preparing"),
    }
}

fn next_step(claim: &v1::ObjectRef, driver: &v1::ClaimDriver) -> Option<String> {
    let (name, retry) = (&driver.driver, driver.retry.as_ref()?);
    if driver.state != "unpreparing" {
        return Some(next_prepare(name, retry));
    }
    let v1::ObjectRef {
        namespace,
        name: claim,
        ..
    } = claim;
    Some(match retry.when.as_str() {
        "at" => format!(
            "the daemon retries unprepare by driver {name} on {}, or as soon as it serves again",
            rfc3339(retry.at_ms)
        ),
        "when-serving" => format!(
            "unprepared as soon as driver {name} serves; if it never will: `nodedock release claim {claim} --namespace {namespace}`"
        ),
        "when-changed" => next_prepare(name, retry),
        _ => format!("driver {name} is unpreparing it"),
    })
}

/// Describes the time at which a prepare of the claim's pod can succeed.
fn next_prepare(driver: &str, retry: &v1::Retry) -> String {
    match retry.when.as_str() {
        "at" => format!(
            "driver {driver} may be called again on {}",
            rfc3339(retry.at_ms)
        ),
        "when-serving" => format!("retry its pod when driver {driver} serves"),
        "when-changed" => format!(
            "driver {driver} is not called again until the request changes, or the driver does (version, grant, config, devices)"
        ),
        _ => format!("a retry of its pod calls driver {driver}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(at_ms: u64, what: &str) -> v1::Transition {
        v1::Transition {
            at_ms,
            what: what.to_owned(),
            ..Default::default()
        }
    }

    #[test]
    fn state_age_counts_from_its_entry() {
        let history = [
            entry(1, "preparing"),
            entry(2, "refused by driver"),
            entry(3, "preparing"),
            entry(4, "prepared"),
            entry(5, "joined"),
            entry(6, "unpreparing"),
            entry(7, "not unprepared by driver"),
        ];
        let cases = [
            ("preparing", 3, Some(1)),
            ("prepared", 5, Some(4)),
            ("unpreparing", 7, Some(6)),
            ("prepared", 3, None),
        ];
        for (state, length, expected) in cases {
            assert_eq!(since(state, &history[..length]), expected, "{state}");
        }
        let again = [
            entry(4, "prepared"),
            entry(9, "preparing after a new boot"),
            entry(10, "preparing"),
        ];
        assert_eq!(since("preparing", &again), Some(9));
    }
}
