//! A DRA driver in Go on the official helper library that the daemon hosts.

use std::path::PathBuf;

use nodedock_proto::node::v1;
use nodedock_tests::compose::{claim, pod, request};
use nodedock_tests::machine::or_skip;
use nodedock_tests::{DEADLINE, Daemon, Root};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tokio::process::Command;
use tokio::time::timeout;

use crate::programs::{self, Running};

pub(crate) const NAME: &str = "gpu.example.com";
const SERVICE: &str = "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/";

/// The driver's program, or nothing and a line that says what is left out.
pub(crate) fn program() -> Option<PathBuf> {
    or_skip(
        "a driver on the official library in Go",
        programs::go("dra-driver"),
    )
}

/// A running instance of the driver. It is killed when dropped.
pub(crate) struct Driver(Running);

impl Driver {
    /// Starts it on the directories of a root. Its claims are those of `compose`, each with a device of the claim's name, unless an option
    /// names an API server.
    pub(crate) async fn start(root: &Root, program: &PathBuf, options: &[&str]) -> Self {
        let data = root.path().join("plugins").join(NAME);
        std::fs::create_dir_all(&data).expect("a directory of a new root");
        let mut command = Command::new(program);
        command.args([
            "--driver-name",
            NAME,
            "--node-name",
            "node",
            "--request",
            "device-0",
        ]);
        command
            .arg("--registry-dir")
            .arg(root.state().join("plugins_registry"));
        command
            .arg("--data-dir")
            .arg(data)
            .arg("--cdi-dir")
            .arg(root.cdi())
            .args(options);
        let mut driver = Self(Running::start(command));
        driver
            .event("it starts", |event| event["event"] == "started")
            .await;
        driver
    }

    /// The next event that is wanted; those before are passed over.
    async fn event(&mut self, what: &str, wanted: impl Fn(&Value) -> bool) -> Value {
        let found = self.0.event(what, wanted).await;
        self.0.forget();
        found
    }

    /// The next call of a method of the DRA service: its claims.
    pub(crate) async fn claims_of(&mut self, method: &str) -> Value {
        let full = format!("{SERVICE}{method}");
        let mut call = self
            .event(&format!("{method} is called"), |event| {
                event["method"] == full.as_str()
            })
            .await;
        call["claims"].take()
    }

    async fn registered(&mut self) {
        self.event("it is registered", |event| event["registered"] == true)
            .await;
    }

    /// Asks it to end as Kubernetes asks a pod.
    async fn stop(mut self) {
        let id = self
            .0
            .process
            .id()
            .and_then(|id| Pid::from_raw(i32::try_from(id).ok()?));
        kill_process(id.expect("it runs"), Signal::TERM).expect("a child may be signalled");
        let ended = timeout(DEADLINE, self.0.process.wait())
            .await
            .expect("the driver ends");
        assert!(ended.expect("a child can be waited for").success());
    }

    pub(crate) async fn kill(mut self) {
        self.0.process.kill().await.expect("a child may be killed");
    }
}

/// Waits until the instance whose socket's name contains `instance` serves.
pub(crate) async fn until_serving(daemon: &Daemon, instance: &str) {
    daemon
        .until(&format!("{NAME} {instance} serves"), async |mut client| {
            let answer = client.list_drivers(v1::ListDriversRequest::default()).await;
            let drivers = answer
                .map_err(|status| status.to_string())?
                .into_inner()
                .drivers;
            let wanted =
                |driver: &&v1::Driver| driver.name == NAME && driver.source.contains(instance);
            let serves = drivers
                .iter()
                .find(wanted)
                .is_some_and(|driver| driver.state == "serving");
            if serves {
                Ok(())
            } else {
                Err(format!("{drivers:#?}"))
            }
        })
        .await;
}

fn claim_of(name: &str) -> v1::Claim {
    claim(name, &[&format!("{NAME}/node/{name}")])
}

fn cdi(name: &str) -> String {
    format!("{NAME}/claim=claim-{name}-{name}")
}

/// A claim as the driver tells of it.
fn named(name: &str) -> Value {
    json!({"namespace": "default", "name": name, "uid": format!("claim-{name}")})
}

fn with_edits(name: &str) -> Value {
    let mut claim = named(name);
    claim["cdi"] = json!([cdi(name)]);
    claim
}

#[tokio::test]
async fn pod_claims_share_each_driver_call() {
    let Some(program) = program() else { return };
    let daemon = Daemon::start().await;
    let mut driver = Driver::start(&daemon, &program, &[]).await;
    driver.registered().await;
    until_serving(&daemon, NAME).await;

    let pod = pod("both");
    let answer = daemon
        .prepared(request(&pod, &[&claim_of("a"), &claim_of("b")]))
        .await;
    let [container] = answer.containers.as_slice() else {
        panic!("one container: {answer:#?}")
    };
    assert_eq!(container.cdi_devices, [cdi("a"), cdi("b")]);
    let asked = driver.claims_of("NodePrepareResources").await;
    assert_eq!(asked, json!([with_edits("a"), with_edits("b")]));

    let outcomes = daemon.unprepare(&pod).await;
    assert!(
        outcomes.iter().all(|(_, outcome)| outcome == "unprepared"),
        "{outcomes:?}"
    );
    assert_eq!(
        driver.claims_of("NodeUnprepareResources").await,
        json!([named("a"), named("b")])
    );
    driver.stop().await;
}

#[tokio::test]
async fn refused_claim_is_named_with_reason() {
    let Some(program) = program() else { return };
    let daemon = Daemon::start().await;
    let _driver = Driver::start(&daemon, &program, &["--fail-claim", "^bad"]).await;
    until_serving(&daemon, NAME).await;

    let pod = pod("half");
    let answer = daemon
        .prepare(request(&pod, &[&claim_of("bad"), &claim_of("good")]))
        .await;
    let outcome = |name: &str| {
        let has_name =
            |claim: &&v1::ClaimOutcome| claim.id.as_ref().is_some_and(|id| id.name == name);
        answer
            .claims
            .iter()
            .find(has_name)
            .unwrap_or_else(|| panic!("{name} is in {answer:#?}"))
    };
    assert_eq!(outcome("good").outcome, "prepared");
    assert_eq!(outcome("bad").outcome, "refused");
    let problem = outcome("bad")
        .problem
        .as_ref()
        .expect("a refusal has a problem");
    assert!(
        problem.message.contains("refused by --fail-claim"),
        "{problem:?}"
    );
    assert!(answer.containers.is_empty(), "{answer:#?}");
}

#[tokio::test]
async fn old_instance_serves_after_new_ends() {
    let Some(program) = program() else { return };
    let daemon = Daemon::start().await;
    let mut old = Driver::start(&daemon, &program, &["--rolling-update-uid", "old"]).await;
    until_serving(&daemon, "-old-").await;
    let first = pod("first");
    daemon.prepared(request(&first, &[&claim_of("a")])).await;
    assert_eq!(
        old.claims_of("NodePrepareResources").await,
        json!([with_edits("a")])
    );

    let mut new = Driver::start(&daemon, &program, &["--rolling-update-uid", "new"]).await;
    until_serving(&daemon, "-new-").await;
    let second = pod("second");
    daemon.prepared(request(&second, &[&claim_of("b")])).await;
    assert_eq!(
        new.claims_of("NodePrepareResources").await,
        json!([with_edits("b")])
    );
    // What the old instance prepared, the new one unprepares.
    daemon.unprepare(&first).await;
    assert_eq!(
        new.claims_of("NodeUnprepareResources").await,
        json!([named("a")])
    );

    new.stop().await;
    until_serving(&daemon, "-old-").await;
    daemon.unprepare(&second).await;
    assert_eq!(
        old.claims_of("NodeUnprepareResources").await,
        json!([named("b")])
    );
}

#[tokio::test]
async fn crashed_driver_unprepares_its_earlier_claims() {
    let Some(program) = program() else { return };
    let daemon = Daemon::start().await;
    let driver = Driver::start(&daemon, &program, &[]).await;
    until_serving(&daemon, NAME).await;
    let pod = pod("one");
    daemon.prepared(request(&pod, &[&claim_of("a")])).await;

    driver.kill().await;
    let mut driver = Driver::start(&daemon, &program, &[]).await;
    driver.registered().await;
    until_serving(&daemon, NAME).await;
    daemon.unprepare(&pod).await;
    assert_eq!(
        driver.claims_of("NodeUnprepareResources").await,
        json!([named("a")])
    );
    assert!(daemon.claims().await.is_empty());
}

#[tokio::test]
async fn crashed_daemon_finds_the_driver() {
    let Some(program) = program() else { return };
    let mut daemon = Daemon::start().await;
    let mut driver = Driver::start(&daemon, &program, &[]).await;
    driver.registered().await;
    until_serving(&daemon, NAME).await;
    let pod = pod("one");
    let before = daemon.prepared(request(&pod, &[&claim_of("a")])).await;

    daemon.crash().await;
    driver.registered().await;
    until_serving(&daemon, NAME).await;
    assert_eq!(
        daemon
            .pod_devices(&pod)
            .await
            .expect("the pod is known")
            .containers,
        before.containers
    );
    daemon.unprepare(&pod).await;
    assert_eq!(
        driver.claims_of("NodeUnprepareResources").await,
        json!([named("a")])
    );
}
