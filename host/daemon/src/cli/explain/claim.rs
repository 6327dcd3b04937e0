//! `nodedock explain claim`: where a claim is, since when, what is wrong, what comes next, and how it came there.

use std::collections::BTreeMap;

use anyhow::Result;
use nodedock_proto::node::v1;
use serde::Serialize;

use super::super::client::{Client, said};
use super::super::get::{Ref, no_such, split};
use super::super::kubelet::Kubelet;
use super::super::output::{Format, Rows, print, printable, say};
use super::super::values::Value;
use super::super::{Outcome, Place};
use super::span;
use nodedock_base::clock::{now_ms, rfc3339};

pub(super) async fn run(client: &mut Client, place: &Place, wanted: &str, format: Format) -> Result<Outcome> {
    let (namespace, name) = split(wanted);
    let request = v1::ListClaimsRequest { namespace, name, with_timeline: true };
    let answer = client.list_claims(request).await.map_err(said(place))?.into_inner();
    let story = Story::new(answer);
    if story.is_empty() {
        return Err(no_such("claim", wanted));
    }
    match format {
        Format::Table | Format::Wide => story.tell(now_ms())?,
        Format::Json | Format::Yaml => {
            let nothing = || Rows { heading: vec![], wide_from: 0, rows: vec![] };
            print(format, &story, nothing, "")?;
        }
    }
    Ok(Outcome::Done)
}

/// All that is known under a name.
#[derive(Serialize)]
struct Story {
    claims: Vec<Claim>,
    /// Refused, and rolled back.
    refused: Vec<Refused>,
    /// Given up by hand.
    released: Vec<Released>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Claim {
    #[serde(flatten)]
    id: Ref,
    state: String,
    /// RFC 3339; none: older than the history reaches.
    since: Option<String>,
    stale_boot: bool,
    pods: Vec<Ref>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kubelet: Option<Kubelet>,
    drivers: Vec<Driver>,
    /// What its drivers changed below `/sys`, and the host would put back.
    values: Vec<Value>,
    next: Vec<String>,
    timeline: Vec<Entry>,
    #[serde(skip)]
    since_ms: Option<u64>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Driver {
    driver: String,
    state: String,
    version: String,
    devices: Vec<String>,
    cdi_devices: Vec<String>,
    problem: Option<Problem>,
    attempts: u32,
    retry: Option<Retry>,
}

#[derive(Serialize)]
struct Retry {
    /// now, at, when-serving or when-changed.
    when: String,
    /// RFC 3339.
    at: Option<String>,
}

#[derive(Serialize)]
struct Problem {
    kind: String,
    code: String,
    message: String,
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    details: BTreeMap<String, String>,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Entry {
    at: String,
    what: String,
    cause: String,
    duration_us: u64,
    problem: Option<Problem>,
    #[serde(skip_serializing_if = "Option::is_none")]
    again: Option<Again>,
    #[serde(skip)]
    at_ms: u64,
}

/// That it happened again.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Again {
    count: u32,
    last_at: String,
    #[serde(skip)]
    last_at_ms: u64,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Refused {
    #[serde(flatten)]
    id: Ref,
    at: String,
    driver: String,
    attempts: u32,
    problem: Option<Problem>,
    retry: Option<Retry>,
    #[serde(skip)]
    at_ms: u64,
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Released {
    #[serde(flatten)]
    id: Ref,
    at: String,
    by: By,
    pods: Vec<Ref>,
    untold: Vec<Untold>,
    /// What became of values below `/sys`.
    values: Vec<Value>,
    timeline: Vec<Entry>,
    #[serde(skip)]
    at_ms: u64,
}

#[derive(Serialize)]
struct By {
    uid: Option<u32>,
    user: String,
    pid: Option<i32>,
}

#[derive(Serialize)]
struct Untold {
    driver: String,
    devices: Vec<String>,
    problem: Option<Problem>,
}

impl From<v1::Problem> for Problem {
    fn from(problem: v1::Problem) -> Self {
        Self { kind: problem.kind, code: problem.code, message: problem.message, details: problem.details }
    }
}

impl From<v1::Retry> for Retry {
    fn from(retry: v1::Retry) -> Self {
        let at = (retry.at_ms > 0).then(|| rfc3339(retry.at_ms));
        Self { when: retry.when, at }
    }
}

impl From<v1::Transition> for Entry {
    fn from(entry: v1::Transition) -> Self {
        Self {
            at: rfc3339(entry.at_ms),
            what: entry.what,
            cause: entry.cause,
            duration_us: entry.duration_us,
            problem: entry.problem.map(Into::into),
            again: entry.again.map(Into::into),
            at_ms: entry.at_ms,
        }
    }
}

impl From<v1::Again> for Again {
    fn from(again: v1::Again) -> Self {
        let (count, last_at_ms) = (again.count, again.last_at_ms);
        Self { count, last_at: rfc3339(last_at_ms), last_at_ms }
    }
}

impl From<v1::ClaimDriver> for Driver {
    fn from(driver: v1::ClaimDriver) -> Self {
        Self {
            driver: driver.driver,
            state: driver.state,
            version: driver.version,
            devices: driver.devices,
            cdi_devices: driver.cdi_devices,
            problem: driver.problem.map(Into::into),
            attempts: driver.attempts,
            retry: driver.retry.map(Into::into),
        }
    }
}

impl From<v1::ClaimStatus> for Claim {
    fn from(claim: v1::ClaimStatus) -> Self {
        let timeline: Vec<Entry> = claim.timeline.into_iter().map(Into::into).collect();
        let since_ms = since(&claim.state, &timeline);
        let id: Ref = claim.id.unwrap_or_default().into();
        let drivers: Vec<Driver> = claim.drivers.into_iter().map(Into::into).collect();
        let next = |driver| next_step(&id, driver);
        Self {
            next: drivers.iter().filter_map(next).collect(),
            id,
            state: claim.state,
            since: since_ms.map(rfc3339),
            stale_boot: claim.stale_boot,
            pods: claim.pods.into_iter().map(Into::into).collect(),
            kubelet: claim.kubelet.map(Into::into),
            drivers,
            values: claim.values.into_iter().map(Into::into).collect(),
            timeline,
            since_ms,
        }
    }
}

impl From<v1::RefusedClaim> for Refused {
    fn from(refused: v1::RefusedClaim) -> Self {
        Self {
            id: refused.id.unwrap_or_default().into(),
            at: rfc3339(refused.at_ms),
            driver: refused.driver,
            attempts: refused.attempts,
            problem: refused.problem.map(Into::into),
            retry: refused.retry.map(Into::into),
            at_ms: refused.at_ms,
        }
    }
}

impl From<v1::ReleasedClaim> for Released {
    fn from(released: v1::ReleasedClaim) -> Self {
        let by = released.by.unwrap_or_default();
        let untold = |driver: v1::UntoldDriver| Untold {
            driver: driver.driver,
            devices: driver.devices,
            problem: driver.problem.map(Into::into),
        };
        Self {
            id: released.id.unwrap_or_default().into(),
            at: rfc3339(released.at_ms),
            by: By { uid: by.uid, user: by.user, pid: by.pid },
            pods: released.pods.into_iter().map(Into::into).collect(),
            untold: released.untold.into_iter().map(untold).collect(),
            values: released.values.into_iter().map(Into::into).collect(),
            timeline: released.timeline.into_iter().map(Into::into).collect(),
            at_ms: released.at_ms,
        }
    }
}

/// When a claim came into its state: the newest entry that begins it and all that follow do not leave it.
fn since(state: &str, timeline: &[Entry]) -> Option<u64> {
    let begins = |what: &str| match state {
        "unpreparing" => matches!(what, "unpreparing" | "rolled back"),
        "prepared" => what == "prepared",
        _ => what.starts_with("preparing"),
    };
    let entries: Vec<_> = timeline.iter().map(|entry| (entry.at_ms, entry.what.as_str())).collect();
    match state {
        // Each request that asks for it again is an entry of its own: the first after another state counts.
        "preparing" => {
            let ended = |(_, what): &(u64, &str)| matches!(*what, "prepared" | "unpreparing");
            let from = entries.iter().rposition(ended).map_or(0, |at| at + 1);
            entries[from..].iter().find(|(_, what)| begins(what)).map(|(at, _)| *at)
        }
        _ => entries.iter().rev().find(|(_, what)| begins(what)).map(|(at, _)| *at),
    }
}

/// What a driver of the claim waits for.
fn next_step(claim: &Ref, driver: &Driver) -> Option<String> {
    let (name, retry) = (&driver.driver, driver.retry.as_ref()?);
    let leaving = driver.state == "unpreparing";
    let at = retry.at.as_deref().unwrap_or_default();
    Some(match (retry.when.as_str(), leaving) {
        ("at", true) => {
            format!("driver {name} is asked again to give it up on {at}, or as soon as it serves anew")
        }
        ("at", false) => format!("driver {name} may be asked again on {at}"),
        ("when-serving", true) => format!(
            "given up as soon as driver {name} serves; if it never will: `nodedock release claim {} --namespace {}`",
            claim.name, claim.namespace
        ),
        ("when-serving", false) => format!("a retry of its pod makes sense when driver {name} serves"),
        ("when-changed", _) => not_until_changed(name),
        (_, true) => format!("driver {name} is being asked to give it up"),
        (_, false) => format!("a retry of its pod asks driver {name}"),
    })
}

fn not_until_changed(driver: &str) -> String {
    format!(
        "driver {driver} is not asked again until the request changes, or the driver does (version, grant, config, devices)"
    )
}

impl Story {
    fn new(answer: v1::ListClaimsResponse) -> Self {
        Self {
            claims: answer.claims.into_iter().map(Into::into).collect(),
            refused: answer.refused.into_iter().map(Into::into).collect(),
            released: answer.released.into_iter().map(Into::into).collect(),
        }
    }

    fn is_empty(&self) -> bool {
        self.claims.is_empty() && self.refused.is_empty() && self.released.is_empty()
    }

    fn tell(&self, now_ms: u64) -> Result<()> {
        self.claims.iter().try_for_each(|claim| claim.tell(now_ms))?;
        self.refused.iter().try_for_each(|refused| refused.tell(now_ms))?;
        self.released.iter().try_for_each(|released| released.tell(now_ms))
    }
}

impl Claim {
    fn tell(&self, now_ms: u64) -> Result<()> {
        let since = self.since_ms.map(|at| format!(" since {} ({})", rfc3339(at), span(at, now_ms)));
        say(&format!("claim {} is {}{}", named(&self.id), self.state, since.unwrap_or_default()))?;
        if self.stale_boot {
            say("  it was prepared in an earlier boot, and is prepared once more when its pod comes back")?;
        }
        pods(&self.pods)?;
        if let Some(kubelet) = &self.kubelet {
            say(&format!("  {}", printable(&kubelet.words())))?;
        }
        for driver in &self.drivers {
            driver.tell()?;
        }
        self.values.iter().try_for_each(|value| say(&format!("  {}", value.words())))?;
        for next in &self.next {
            say(&format!("  next: {}", printable(next)))?;
        }
        history(&self.timeline)
    }
}

impl Driver {
    fn tell(&self) -> Result<()> {
        let by =
            if self.version.is_empty() { String::new() } else { format!(" by version {}", self.version) };
        say(&format!("  driver {}: {}{by}: {}", self.driver, self.state, self.devices.join(", ")))?;
        for name in &self.cdi_devices {
            say(&format!("    CDI device {name}"))?;
        }
        problem(self.problem.as_ref(), "    ")?;
        match self.attempts {
            0 => Ok(()),
            1 => say("    asked once in vain since the daemon started"),
            attempts => say(&format!("    asked {attempts} times in vain since the daemon started")),
        }
    }
}

impl Refused {
    fn tell(&self, now_ms: u64) -> Result<()> {
        let (claim, times) = (named(&self.id), self.attempts);
        let when = format!("{} ({} ago)", self.at, span(self.at_ms, now_ms));
        say(&format!("claim {claim} was refused by driver {} on {when}, {times} times in all", self.driver))?;
        problem(self.problem.as_ref(), "  ")?;
        say("  nothing of it is kept")?;
        let Some(retry) = &self.retry else { return Ok(()) };
        let next = match (retry.when.as_str(), &retry.at) {
            ("when-changed", _) => not_until_changed(&self.driver),
            ("at", Some(at)) => format!("driver {} may be asked again on {at}", self.driver),
            ("when-serving", _) => {
                format!("a retry of its pod makes sense when driver {} serves", self.driver)
            }
            _ => format!("a retry of its pod asks driver {}", self.driver),
        };
        say(&format!("  next: {next}"))
    }
}

impl Released {
    fn tell(&self, now_ms: u64) -> Result<()> {
        let when = format!("{} ({} ago)", self.at, span(self.at_ms, now_ms));
        say(&format!("claim {} was released on {when} by {}", named(&self.id), self.by.words()))?;
        pods(&self.pods)?;
        if self.untold.is_empty() {
            say("  every driver gave it up")?;
        }
        for Untold { driver, devices, problem: why } in &self.untold {
            say(&format!("  driver {driver} was not told, and may still hold {}", devices.join(", ")))?;
            problem(why.as_ref(), "    ")?;
        }
        self.values.iter().try_for_each(|value| say(&format!("  {}", value.words())))?;
        history(&self.timeline)
    }
}

impl By {
    fn words(&self) -> String {
        let pid = self.pid.map(|pid| format!(", pid {pid}")).unwrap_or_default();
        match (self.uid, self.user.as_str()) {
            (None, _) => format!("somebody unknown{pid}"),
            (Some(uid), "") => format!("uid {uid}{pid}"),
            (Some(uid), user) => format!("{} (uid {uid}){pid}", printable(user)),
        }
    }
}

fn named(id: &Ref) -> String {
    format!("{}/{} (UID {})", id.namespace, id.name, id.uid)
}

fn pods(pods: &[Ref]) -> Result<()> {
    pods.iter().try_for_each(|pod| say(&format!("  held by pod {}", named(pod))))
}

fn problem(problem: Option<&Problem>, indent: &str) -> Result<()> {
    let Some(problem) = problem else { return Ok(()) };
    say(&format!("{indent}problem ({}, {}): {}", problem.kind, problem.code, printable(&problem.message)))?;
    for (key, value) in &problem.details {
        say(&format!("{indent}  {}: {}", printable(key), printable(value)))?;
    }
    Ok(())
}

impl Entry {
    fn words(&self) -> String {
        let mut words = printable(&self.what);
        if !self.cause.is_empty() {
            words.push_str(&format!(" ({})", printable(&self.cause)));
        }
        if self.duration_us > 0 {
            words.push_str(&format!(", took {}", super::took(self.duration_us)));
        }
        if let Some(Again { count, last_at, last_at_ms }) = &self.again {
            let passed = span(self.at_ms, *last_at_ms);
            words.push_str(&format!("; {count} times in all, the last on {last_at} (+{passed})"));
        }
        words
    }
}

/// The entries, each with the time that passed since the one before.
fn history(timeline: &[Entry]) -> Result<()> {
    if !timeline.is_empty() {
        say("  history:")?;
    }
    let mut before = None;
    for entry in timeline {
        let passed = before.replace(entry.at_ms).map(|before| format!("+{}", span(before, entry.at_ms)));
        say(&format!("    {}  {:>12}  {}", entry.at, passed.unwrap_or_default(), entry.words()))?;
        problem(entry.problem.as_ref(), "      ")?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(at_ms: u64, what: &str) -> Entry {
        v1::Transition { at_ms, what: what.to_owned(), ..Default::default() }.into()
    }

    #[test]
    fn a_state_is_as_old_as_what_began_it() {
        let history = [
            entry(1, "preparing"),
            entry(2, "refused by driver"),
            entry(3, "preparing"),
            entry(4, "prepared"),
            entry(5, "joined"),
            entry(6, "unpreparing"),
            entry(7, "not given up by driver"),
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
        let again = [entry(4, "prepared"), entry(9, "preparing after a new boot"), entry(10, "preparing")];
        assert_eq!(since("preparing", &again), Some(9));
    }

    #[test]
    fn an_entry_that_stands_for_several_says_how_many_and_when_the_last_was() {
        let again = Some(v1::Again { count: 7, last_at_ms: 62_000 });
        let (what, cause) = ("not given up by driver".to_owned(), "gpu.example.com".to_owned());
        let told = v1::Transition { at_ms: 2_000, what, cause, duration_us: 1_500, problem: None, again };
        let expected = "not given up by driver (gpu.example.com), took 1.5 ms; 7 times in all, the last on 1970-01-01T00:01:02.000Z (+1 min 0 s)";
        assert_eq!(Entry::from(told).words(), expected);
        assert_eq!(entry(1, "prepared").words(), "prepared");
    }

    #[test]
    fn who_released_a_claim_is_said_as_far_as_it_is_known() {
        let by = |uid, user: &str, pid| By { uid, user: user.to_owned(), pid }.words();
        assert_eq!(by(Some(0), "root", Some(7)), "root (uid 0), pid 7");
        assert_eq!(by(Some(1000), "", None), "uid 1000");
        assert_eq!(by(None, "", None), "somebody unknown");
    }
}
