//! A daemon with a scripted driver, and the story of what happened: what must be the same for both kinds.

use nodedock_proto::node::v1;
use nodedock_tests::compose::{claim, pod, request};
use nodedock_tests::{Daemon, Options};
use scripted::{Command, POOL, Script};
use serde_json::{Map, Value, json};
use tokio::task::JoinHandle;
use tonic::Status;

use crate::kind::Kind;

/// Steps of a case with what was seen at each, without what differs by nature: names, versions, times, wording.
pub(crate) type Story = Vec<(String, Value)>;

/// The pod of every claim but those of `release`.
pub(crate) const POD: &str = "one";

pub(crate) struct Scene<K> {
    pub(crate) daemon: Daemon,
    pub(crate) kind: K,
    story: Story,
    view: View,
}

/// The values that the story records.
#[derive(Debug, Clone, Copy)]
struct View {
    /// Names of drivers, and what they are called instead.
    names: [(&'static str, &'static str); 2],
    /// True if the daemon writes CDI files for a claim.
    edits: bool,
    problems: bool,
    timelines: bool,
}

/// An answer that is not there yet.
pub(crate) type Asked = JoinHandle<Result<v1::PreparePodResponse, Status>>;

impl<K: Kind> Scene<K> {
    /// A daemon that the driver serves.
    pub(crate) async fn start() -> Self {
        Self::start_with(Options::default()).await
    }

    pub(crate) async fn start_with(options: Options) -> Self {
        let daemon = Daemon::start_with(options).await;
        let mut kind = K::new(&daemon);
        kind.come(&daemon).await;
        let names = [(K::DRIVER, "DRIVER"); 2];
        let view = View {
            names,
            edits: K::EDITS,
            problems: true,
            timelines: true,
        };
        Self {
            daemon,
            kind,
            story: Story::new(),
            view,
        }
    }

    /// A driver of another kind beside it.
    pub(crate) async fn join<O: Kind>(&mut self) -> O {
        let mut other = O::new(&self.daemon);
        other.come(&self.daemon).await;
        self.view.names[1] = (O::DRIVER, "OTHER");
        self.view.edits |= O::EDITS;
        other
    }

    /// Tells of a problem only that there is one.
    pub(crate) fn any_problem_will_do(&mut self) {
        self.view.problems = false;
    }

    /// Tells no timelines: how often a driver is asked depends on time, or their order on names.
    pub(crate) fn without_timelines(&mut self) {
        self.view.timelines = false;
    }

    pub(crate) fn end(self) -> Story {
        self.story
    }

    /// Adds to the story.
    pub(crate) fn tell(&mut self, step: &str, seen: Value) {
        let seen = self.view.normal(seen);
        self.story.push((step.to_owned(), seen));
    }

    /// Sets the command of later prepares of `claim`.
    pub(crate) async fn set_prepare(&mut self, claim: &str, command: Command) {
        let script = Script {
            prepare: [(claim.to_owned(), command)].into(),
            ..Script::default()
        };
        self.kind.run_script(&self.daemon, script).await;
    }

    /// Sets the command of later unprepares of `claim`.
    pub(crate) async fn set_unprepare(&mut self, claim: &str, command: Command) {
        let script = Script {
            unprepare: [(claim.to_owned(), command)].into(),
            ..Script::default()
        };
        self.kind.run_script(&self.daemon, script).await;
    }

    pub(crate) fn request(&self, claims: &[&str]) -> v1::PreparePodRequest {
        let claims: Vec<_> = claims.iter().map(|name| self.claim(name)).collect();
        request(&pod(POD), &claims.iter().collect::<Vec<_>>())
    }

    /// A claim for the device of its name.
    pub(crate) fn claim(&self, name: &str) -> v1::Claim {
        claim(name, &[&format!("{}/{POOL}/{name}", K::DRIVER)])
    }

    /// Prepares these claims of the pod and tells the answer.
    pub(crate) async fn prepare(&mut self, claims: &[&str]) -> v1::PreparePodResponse {
        let answer = self.daemon.prepare(self.request(claims)).await;
        self.tell(&format!("prepare {}", claims.join(",")), answered(&answer));
        answer
    }

    /// Prepares, and expects these outcomes: `prepared`, or a problem's code.
    pub(crate) async fn prepare_to(&mut self, expected: &[(&str, &str)]) {
        let claims: Vec<_> = expected.iter().map(|(name, _)| *name).collect();
        let answer = self.prepare(&claims).await;
        let seen = answer.claims.iter().map(ended);
        assert!(
            seen.eq(expected.iter().map(|(_, end)| *end)),
            "{answer:#?}\n{}",
            self.daemon.log()
        );
        let all = expected.iter().all(|(_, end)| *end == "prepared");
        assert_eq!(answer.containers.len(), usize::from(all), "{answer:#?}");
    }

    /// Asks, and does not wait for the answer.
    pub(crate) fn ask(&self, claims: &[&str]) -> Asked {
        let (mut client, request) = (self.daemon.client(), self.request(claims));
        tokio::spawn(async move {
            client
                .prepare_pod(request)
                .await
                .map(tonic::Response::into_inner)
        })
    }

    /// Asks for the pod's claims to be unprepared, and does not wait for the answer.
    pub(crate) fn ask_unprepare(&self) -> JoinHandle<Result<v1::UnpreparePodResponse, Status>> {
        let mut client = self.daemon.client();
        let request = v1::UnpreparePodRequest {
            pod: Some(pod(POD)),
        };
        tokio::spawn(async move {
            client
                .unprepare_pod(request)
                .await
                .map(tonic::Response::into_inner)
        })
    }

    /// Waits for an answer and records it in the story.
    pub(crate) async fn answered(&mut self, asked: Asked) -> v1::PreparePodResponse {
        let answer = asked.await.expect("asking does not panic");
        let answer = answer.unwrap_or_else(|status| panic!("{status}\n{}", self.daemon.log()));
        self.tell("answer", answered(&answer));
        answer
    }

    /// Gives the pod's claims up and expects these outcomes: `unprepared`, or a problem's code.
    pub(crate) async fn unprepare_to(&mut self, expected: &[(&str, &str)]) {
        let answer = self.daemon.unprepare_pod(&pod(POD)).await;
        let outcomes: Vec<_> = answer.claims.iter().map(outcome).collect();
        self.tell("unprepare", outcomes.into());
        let seen: Vec<_> = answer
            .claims
            .iter()
            .map(|claim| (name_of(claim), ended(claim)))
            .collect();
        assert_eq!(seen, by_name(expected), "{}", self.daemon.log());
    }

    /// Ends every hold.
    pub(crate) async fn release(&self) {
        self.daemon
            .prepared(request(&pod("releaser"), &[&self.claim("release")]))
            .await;
    }

    pub(crate) async fn until_asked(&mut self, call: &str, times: usize) {
        self.kind.until_asked(&self.daemon, call, times).await;
    }

    /// Returns the driver's calls so far.
    pub(crate) fn calls(&mut self) -> Vec<String> {
        self.kind.calls(&self.daemon)
    }

    /// Tells what the driver was asked so far, and expects this.
    pub(crate) fn expect_calls(&mut self, expected: &[&str]) {
        let calls = self.calls();
        assert_eq!(calls, expected, "{}", self.daemon.log());
        self.tell("calls", json!(calls));
    }

    /// Tells what the checkpoint has and, of a daemon that runs, what it says of the claims; checks the CDI directory.
    pub(crate) async fn look(&mut self, expected: &[(&str, &str)]) {
        let dump = self.dump().await;
        let claims = dump["claims"].as_array().expect("a list").iter();
        let states: Vec<_> = claims
            .map(|claim| (text(&claim["id"]["name"]), text(&claim["state"])))
            .collect();
        assert_eq!(states, by_name(expected), "{}", self.daemon.log());
        self.check_cdi_dir(expected);
        self.tell("checkpoint", dump);
    }

    /// The same, of a daemon that runs: what it says of its claims is recorded as well.
    pub(crate) async fn see(&mut self, expected: &[(&str, &str)]) {
        self.look(expected).await;
        let claims = self.daemon.claims().await;
        let states: Vec<_> = claims
            .iter()
            .map(|claim| (claim_name(claim), claim.state.as_str()))
            .collect();
        assert_eq!(states, by_name(expected), "{}", self.daemon.log());
        self.tell("claims", claims.iter().map(status).collect());
    }

    async fn dump(&self) -> Value {
        let mut dump = self
            .daemon
            .cli(&["checkpoint", "dump", "-o", "json"])
            .await
            .json();
        json!({"claims": dump["claims"].take(), "pods": dump["pods"].take()})
    }

    /// A file for each claim that is prepared, and none for one that is unknown, or was never prepared.
    fn check_cdi_dir(&self, claims: &[(&str, &str)]) {
        let files: Vec<_> = self
            .daemon
            .cdi_files()
            .iter()
            .map(|file| file.claim_uid().to_owned())
            .collect();
        let named = |wanted: &str| -> Vec<String> {
            let claims = claims
                .iter()
                .filter(|(_, state)| self.view.edits && *state == wanted);
            claims.map(|(name, _)| format!("claim-{name}")).collect()
        };
        let (prepared, leaving) = (named("prepared"), named("unpreparing"));
        assert!(
            prepared.iter().all(|claim| files.contains(claim)),
            "{prepared:?} in {files:?}"
        );
        let owned = |file: &String| prepared.contains(file) || leaving.contains(file);
        assert!(files.iter().all(owned), "only {claims:?} in {files:?}");
    }

    /// The claims are unprepared, and nothing is left of them but what `release` needs.
    pub(crate) async fn clean(&mut self) {
        self.daemon.unprepare(&pod("releaser")).await;
        self.see(&[]).await;
        assert_eq!(self.daemon.pods().await, []);
    }

    /// Kills the daemon, tells what its checkpoint has, and starts it again.
    pub(crate) async fn crash(&mut self, expected: &[(&str, &str)]) {
        self.daemon.kill9().await;
        self.look(expected).await;
        self.daemon.run().await;
        self.daemon.until_serving(K::DRIVER).await;
    }
}

/// Sorts claims as the daemon lists them.
fn by_name<'a>(claims: &[(&'a str, &'a str)]) -> Vec<(&'a str, &'a str)> {
    let mut claims = claims.to_vec();
    claims.sort_unstable();
    claims
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn name_of(claim: &v1::ClaimOutcome) -> &str {
    claim.id.as_ref().map_or("", |id| &id.name)
}

fn claim_name(claim: &v1::ClaimStatus) -> &str {
    claim.id.as_ref().map_or("", |id| &id.name)
}

/// `prepared`, `unprepared` or the problem's code.
fn ended(claim: &v1::ClaimOutcome) -> &str {
    claim
        .problem
        .as_ref()
        .map_or(&claim.outcome, |problem| &problem.code)
}

fn problem(problem: Option<&v1::Problem>) -> Value {
    problem.map_or(
        Value::Null,
        |problem| json!({"kind": problem.kind, "code": problem.code}),
    )
}

fn outcome(claim: &v1::ClaimOutcome) -> Value {
    json!({"claim": name_of(claim), "outcome": claim.outcome, "problem": problem(claim.problem.as_ref())})
}

pub(crate) fn answered(answer: &v1::PreparePodResponse) -> Value {
    let devices =
        |container: &v1::ContainerDevices| json!([container.name, container.cdi_devices.len()]);
    let containers: Vec<_> = answer.containers.iter().map(devices).collect();
    json!({"claims": answer.claims.iter().map(outcome).collect::<Vec<_>>(), "containers": containers})
}

/// `POOL/DEVICE` of a device as claims name it.
fn in_pool(device: &str) -> String {
    let parts: Vec<_> = device.rsplitn(3, '/').collect();
    let [device, pool, ..] = parts[..] else {
        panic!("{device} is not POOL/DEVICE")
    };
    format!("{pool}/{device}")
}

fn status(claim: &v1::ClaimStatus) -> Value {
    let driver = |driver: &v1::ClaimDriver| {
        // The daemon publishes the pools of a WASM driver as NODE/POOL; a plugin names its own as it likes.
        let devices: Vec<_> = driver
            .devices
            .iter()
            .map(|device| in_pool(device))
            .collect();
        let seen = json!({
            "state": driver.state,
            "devices": devices,
            "cdi_devices": driver.cdi_devices.len(),
            "problem": problem(driver.problem.as_ref()),
        });
        (driver.driver.clone(), seen)
    };
    let drivers: Map<_, _> = claim.drivers.iter().map(driver).collect();
    json!({
        "claim": claim_name(claim),
        "state": claim.state,
        "pods": claim.pods.iter().map(|pod| &pod.name).collect::<Vec<_>>(),
        "drivers": drivers,
        "problem": problem(claim.problem.as_ref()),
    })
}

impl View {
    /// Returns a value without the parts that differ between drivers and between runs.
    fn normal(&self, value: Value) -> Value {
        match value {
            Value::String(text) => self.renamed(&text).into(),
            Value::Array(entries) => entries
                .into_iter()
                .map(|entry| self.normal(entry))
                .collect(),
            Value::Object(entries) => {
                let entry = |(key, value): (String, Value)| {
                    let value = self.field(&key, value)?;
                    Some((self.renamed(&key), self.normal(value)))
                };
                Value::Object(entries.into_iter().filter_map(entry).collect::<Map<_, _>>())
            }
            other => other,
        }
    }

    fn renamed(&self, text: &str) -> String {
        self.names
            .iter()
            .fold(text.to_owned(), |text, (name, instead)| {
                text.replace(name, instead)
            })
    }

    /// A field of a record; none if it says nothing that both kinds have.
    fn field(&self, key: &str, value: Value) -> Option<Value> {
        match key {
            "at_ms" | "duration_us" => None,
            "timeline" if !self.timelines => None,
            // In the order of the drivers' names, which say nothing.
            "holds" => {
                let mut holds: Vec<_> = value.as_array().into_iter().flatten().cloned().collect();
                holds.sort_by_cached_key(|hold| self.renamed(text(&hold["key"])));
                Some(holds.into())
            }
            // Who prepared it: kind, version, digest.
            "by" => Some(json!("operator")),
            // Where the daemon's own try came first, the operator's was still waiting.
            "releasing" if !self.timelines => None,
            "releasing" => Some(json!("operator")),
            "prepared" => {
                let device =
                    |device: &Value| json!([device["requests"], device["pool"], device["device"]]);
                value["devices"]
                    .as_array()
                    .map(|devices| devices.iter().map(device).collect())
            }
            "problem" if value.is_null() => Some(value),
            "problem" if !self.problems => Some(json!("some")),
            "problem" => Some(json!({"kind": value["kind"], "code": value["code"]})),
            _ => Some(value),
        }
    }
}
