//! Death on the way of a claim of the local API: it is made, protected, allocated, reserved, prepared, unprepared, released and deleted. Each of
//! its writes is a commit, so the points of a commit and those of a claim are all that it passes.

use std::time::Instant;

use nodedock_base::failpoint::Point;
use nodedock_kube::client::ErrorKind;
use nodedock_kube::local_client::{LocalClient, ObjectError};
use nodedock_proto::node::v1;
use nodedock_tests::compose::{of_claim, pod};
use nodedock_tests::drivers::MOCK_GPU_FILE;
use nodedock_tests::machine::tell;
use nodedock_tests::{DEADLINE, Daemon, Options, Root};
use serde_json::{Value, json};
use tokio::time::timeout;

use crate::scene::assert_killed;
use crate::{Place, every_pass};

/// Those that a claim of a pure driver passes: there is no intent.
const POINTS: [Point; 8] = [
    Point::CheckpointCommit,
    Point::CheckpointCommitted,
    Point::PrepareAnswered,
    Point::PrepareCommitted,
    Point::PrepareDone,
    Point::UnprepareAnswered,
    Point::UnprepareFilesRemoved,
    Point::UnprepareForgotten,
];

const CLAIM: &str = "one";
const NAMESPACE: &str = "default";

/// Steps with the claim, in order. Each may be repeated.
#[derive(Debug, Clone, Copy)]
enum Step {
    Create,
    Allocated,
    Prepare,
    Unprepare,
    Delete,
    Gone,
}

const STEPS: [Step; 6] = [
    Step::Create,
    Step::Allocated,
    Step::Prepare,
    Step::Unprepare,
    Step::Delete,
    Step::Gone,
];

struct Scene {
    daemon: Daemon,
    died: bool,
}

impl Scene {
    async fn start() -> Self {
        let root = Root::new();
        root.install_gpus("driverVersion: 1.0.0\n");
        let daemon = Daemon::start_on(root, Options::default().flag("--local-api")).await;
        let class = json!({ "apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", "metadata": { "name": "gpu" },
            "spec": { "selectors": [{ "cel": { "expression": "device.driver == 'mock-gpu.nodedock.dev'" } }] } });
        api(&daemon)
            .await
            .expect("it listens")
            .create(&class, NAMESPACE)
            .await
            .expect("a class");
        Self {
            daemon,
            died: false,
        }
    }

    /// Plays the steps, and returns whether the daemon died.
    async fn play(&mut self, point: Point, pass: u32) -> bool {
        let _place = Place(format!("at pass {pass} of {point:?}"));
        self.died = false;
        self.daemon.kill9().await;
        self.daemon.arm(point, pass);
        if let Err(status) = self.daemon.try_run().await {
            assert_killed(status);
            self.again().await;
        }
        for step in STEPS {
            while let Err(why) = self.take(step).await {
                assert!(!self.died, "{step:?}: {why}\n{}", self.daemon.log());
                assert_killed(self.daemon.ended().await);
                self.again().await;
            }
        }
        self.nothing_is_left().await;
        self.died
    }

    async fn again(&mut self) {
        self.died = true;
        self.daemon.disarm();
        self.daemon.run().await;
        // An unprepare does not wait for a driver that is being loaded: the daemon retries it.
        self.daemon.until_serving(MOCK_GPU_FILE).await;
    }

    /// Takes a step, unless the daemon dies.
    async fn take(&self, step: Step) -> Result<(), String> {
        let taken = timeout(DEADLINE, self.taken(step));
        tokio::select! {
            // An answer that was sent counts, although the daemon died since.
            biased;
            taken = taken => taken.unwrap_or_else(|_| panic!("{step:?} takes too long\n{}", self.daemon.log())),
            () = self.daemon.death() => Err("the daemon is dead".to_owned()),
        }
    }

    async fn taken(&self, step: Step) -> Result<(), String> {
        let api = api(&self.daemon).await?;
        let mut client = self.daemon.client();
        match step {
            Step::Create => match api.create(&claim(), NAMESPACE).await {
                Err(ObjectError::Api(error)) if error.kind == ErrorKind::Conflict && self.died => {
                    Ok(())
                }
                created => created.map(drop).map_err(|error| error.to_string()),
            },
            Step::Allocated => {
                let claim = api
                    .until_allocated(NAMESPACE, CLAIM)
                    .await
                    .ok_or("the claim is gone")?;
                let device = &claim["status"]["allocation"]["devices"]["results"][0]["device"];
                assert_eq!(device, "gpu-0", "all are free: {claim}");
                Ok(())
            }
            Step::Prepare => {
                let request = of_claim(&pod("web"), CLAIM);
                let answer = client
                    .prepare_pod(request)
                    .await
                    .map_err(|status| status.to_string())?;
                let claims = answer.into_inner().claims;
                assert!(
                    claims.iter().all(|claim| claim.outcome == "prepared"),
                    "{claims:#?}"
                );
                let claim = api
                    .claim(NAMESPACE, CLAIM)
                    .await
                    .map_err(|error| error.to_string())?;
                let claim = claim.expect("it is prepared");
                assert_eq!(
                    claim["status"]["reservedFor"][0]["uid"],
                    pod("web").uid,
                    "{claim}"
                );
                Ok(())
            }
            Step::Unprepare => {
                let request = v1::UnpreparePodRequest {
                    pod: Some(pod("web")),
                };
                let answer = client
                    .unprepare_pod(request)
                    .await
                    .map_err(|status| status.to_string())?;
                let claims = answer.into_inner().claims;
                assert!(
                    claims.iter().all(|claim| claim.problem.is_none()),
                    "{claims:#?}"
                );
                Ok(())
            }
            Step::Delete => {
                let deleted = api.delete_claim(NAMESPACE, CLAIM, None).await;
                deleted.map(drop).map_err(|error| error.to_string())
            }
            Step::Gone => {
                let claim = api
                    .claim(NAMESPACE, CLAIM)
                    .await
                    .map_err(|error| error.to_string())?;
                let Some(claim) = claim else { return Ok(()) };
                let uid = claim["metadata"]["uid"]
                    .as_str()
                    .expect("an object has a UID");
                let is_gone = api.until_gone(NAMESPACE, CLAIM, uid, DEADLINE).await;
                is_gone
                    .then_some(())
                    .ok_or_else(|| format!("it stays: {claim}"))
            }
        }
    }

    /// The daemon may die until it is asked.
    async fn nothing_is_left(&mut self) {
        let asked = self
            .daemon
            .client()
            .list_claims(v1::ListClaimsRequest::default())
            .await;
        if asked.is_err() {
            assert!(!self.died, "{asked:?}\n{}", self.daemon.log());
            assert_killed(self.daemon.ended().await);
            self.again().await;
        }
        self.daemon.assert_empty().await;
        let claims = api(&self.daemon)
            .await
            .expect("it listens")
            .claims(None)
            .await
            .expect("claims");
        assert_eq!(claims, Vec::<Value>::new());
    }
}

async fn api(daemon: &Daemon) -> Result<LocalClient, String> {
    let socket = daemon.socket().with_file_name("api.sock");
    LocalClient::connect(&socket)
        .await
        .map_err(|error| error.to_string())
}

fn claim() -> Value {
    json!({ "apiVersion": "resource.k8s.io/v1", "kind": "ResourceClaim", "metadata": { "name": CLAIM },
        "spec": { "devices": { "requests": [{ "name": "gpu", "exactly": { "deviceClassName": "gpu" } }] } } })
}

#[tokio::test]
async fn crash_loses_no_local_api_claim() {
    let mut scene = Scene::start().await;
    scene.daemon.until_serving(MOCK_GPU_FILE).await;
    let (started, mut deaths) = (Instant::now(), 0);
    for point in POINTS {
        deaths += every_pass(point, async |pass| scene.play(point, pass).await).await;
    }
    tell(&format!(
        "claims of the local API: {deaths} deaths at {} points in {:.0?}",
        POINTS.len(),
        started.elapsed()
    ));
}
