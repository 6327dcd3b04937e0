use nodedock_stand_ins::api_server::{Allocated, ApiServer, Fault, Seen, When};
use parking_lot::Mutex;
use serde_json::Value;
use tokio::time::Duration;

use super::super::client::tests::over;
use super::*;
use nodedock_model::{
    Condition, DeviceName, DeviceStatus, ObjectRef, PoolName, ProblemCode, ReportedDevice,
};

struct Cluster {
    server: Arc<ApiServer>,
    conditions: Conditions,
    refusals: Arc<Mutex<Vec<String>>>,
    writer: Statuses,
    tasks: Tasks,
    claim: ObjectRef,
}

impl Cluster {
    async fn new(claim: Allocated) -> Self {
        let server = Arc::new(ApiServer::start().await);
        let uid = server.allocate_claim(claim);
        let (tasks, conditions) = (Tasks::new(), Conditions::default());
        let refusals = Arc::<Mutex<Vec<String>>>::default();
        let refused = refusals.clone();
        let on_refused: OnRefused = Arc::new(move |refusal| {
            let pods = refusal.consumers.iter().map(|pod| pod.name.as_str());
            let pods = pods.collect::<Vec<_>>().join(" ");
            let Refusal { action, claim, .. } = refusal;
            refused.lock().push(format!("{action} {claim} of {pods}"));
        });
        let writer = Statuses::start(
            &tasks,
            &over(&server),
            conditions.clone(),
            on_refused,
            limit::STATUSES_MAX,
        );
        Self {
            server,
            conditions,
            refusals,
            writer,
            tasks,
            claim: ObjectRef::new("default", "one", &uid).unwrap(),
        }
    }

    /// Drivers report these reasons, and others nothing.
    fn report(&self, reasons: &[(&str, &[&str])]) {
        self.writer.set(reported(&self.claim, reasons));
    }

    /// Waits until the writer waits. Returns the requests for claims since the last call.
    async fn written(&self) -> Vec<Seen> {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let requests = self.server.requests();
        self.server.forget_requests();
        requests
            .into_iter()
            .filter(|seen| seen.resource == "resourceclaims")
            .collect()
    }

    /// Drivers and reasons of the first condition in the claim's status.
    fn entries(&self) -> Vec<(String, String)> {
        let claim = self.server.get("resourceclaims", "default", "one").unwrap();
        let entries = claim["status"]["devices"]
            .as_array()
            .cloned()
            .unwrap_or_default();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        entries
            .iter()
            .map(|entry| {
                (
                    text(&entry["driver"]),
                    text(&entry["conditions"][0]["reason"]),
                )
            })
            .collect()
    }

    fn counts(&self) -> [u64; 4] {
        let counts = &self.writer.counts;
        [
            &counts.written,
            &counts.unchanged,
            &counts.refused,
            &counts.dropped,
        ]
        .map(Counter::get)
    }

    fn codes(&self) -> Vec<String> {
        self.conditions
            .list()
            .into_iter()
            .map(|condition| condition.problem.code)
            .collect()
    }
}

fn allocated() -> Allocated {
    Allocated::new("default", "one")
        .device("gpu", "gpu.example.com", "node-1", "gpu-0")
        .device("nic", "nic.example.com", "node-1", "gpu-0")
        .config("FromClaim", &["gpu"], "gpu.example.com", json!({"a": 1}))
}

/// A report of device `gpu-0` by each driver with a condition for each reason; none: nothing is reported.
fn reported(claim: &ObjectRef, drivers: &[(&str, &[&str])]) -> Reported {
    let condition = |reason: &&str| Condition {
        kind: "Ready".to_owned(),
        status: Some(true),
        reason: (*reason).to_owned(),
        message: String::new(),
    };
    let device = |(driver, reasons): &(&str, &[&str])| ReportedDevice {
        driver: DriverName::new(*driver).unwrap(),
        pool: PoolName::new("node-1").unwrap(),
        device: DeviceName::new("gpu-0").unwrap(),
        share_id: None,
        status: DeviceStatus {
            conditions: reasons.iter().map(condition).collect(),
            ..DeviceStatus::default()
        },
    };
    let devices = drivers.iter().map(device).collect();
    [(
        claim.uid.clone(),
        ClaimStatuses {
            claim: claim.clone(),
            allocated_ms: 0,
            devices,
        },
    )]
    .into()
}

const GPU: &str = "gpu.example.com";
const NIC: &str = "nic.example.com";

fn pairs(entries: &[(&str, &str)]) -> Vec<(String, String)> {
    entries
        .iter()
        .map(|(driver, reason)| ((*driver).to_owned(), (*reason).to_owned()))
        .collect()
}

#[tokio::test(start_paused = true)]
async fn unchanged_status_is_not_rewritten() {
    let cluster = Cluster::new(allocated()).await;
    cluster.report(&[(GPU, &["Old"])]);
    // Of two reports that wait the newer counts.
    cluster.report(&[(GPU, &["New"])]);
    let requests = cluster.written().await;
    let verbs: Vec<_> = requests
        .iter()
        .map(|seen| (seen.verb.as_str(), seen.full_resource()))
        .collect();
    assert_eq!(
        verbs,
        [
            ("get", "resourceclaims".to_owned()),
            ("patch", "resourceclaims/status".to_owned())
        ]
    );
    assert_eq!(requests[1].content_type, "application/apply-patch+yaml");
    assert_eq!(
        requests[1].query["fieldManager"],
        "nodedock/gpu.example.com"
    );
    assert_eq!(
        (cluster.entries(), cluster.counts()),
        (pairs(&[(GPU, "New")]), [1, 0, 0, 0])
    );
    cluster.report(&[(GPU, &["New"])]);
    assert_eq!(
        (cluster.written().await.len(), cluster.counts()),
        (0, [1, 0, 0, 0])
    );
    let restarted = Statuses::start(
        &cluster.tasks,
        &over(&cluster.server),
        Conditions::default(),
        Arc::new(|_| {}),
        limit::STATUSES_MAX,
    );
    restarted.set(reported(&cluster.claim, &[(GPU, &["New"])]));
    assert_eq!(
        (
            cluster.written().await.len(),
            restarted.counts.unchanged.get()
        ),
        (1, 1)
    );
    assert!(cluster.tasks.drain(Duration::from_secs(1)).await);
}

/// A driver that reports after a restart leaves the entries of one that has not reported yet.
#[tokio::test(start_paused = true)]
async fn driver_changes_only_its_own_entries() {
    let cluster = Cluster::new(allocated()).await;
    cluster.report(&[(GPU, &["A"]), (NIC, &["B"])]);
    cluster.written().await;
    assert_eq!(cluster.entries(), pairs(&[(GPU, "A"), (NIC, "B")]));
    let tasks = Tasks::new();
    let restarted = Statuses::start(
        &tasks,
        &over(&cluster.server),
        Conditions::default(),
        Arc::new(|_| {}),
        limit::STATUSES_MAX,
    );
    restarted.set(reported(&cluster.claim, &[(NIC, &["C"])]));
    cluster.written().await;
    assert_eq!(cluster.entries(), pairs(&[(GPU, "A"), (NIC, "C")]));
    cluster.report(&[(NIC, &["B"])]);
    cluster.written().await;
    assert_eq!(cluster.entries(), pairs(&[(NIC, "C")]));
}

#[tokio::test(start_paused = true)]
async fn conflict_is_read_again() {
    let cluster = Cluster::new(allocated()).await;
    cluster
        .server
        .fail_times(2, Fault::Status(409), When::any().verb("patch"));
    cluster.report(&[(GPU, &["New"])]);
    assert_eq!(
        (cluster.written().await.len(), cluster.counts()),
        (6, [1, 0, 0, 0])
    );
    cluster.server.delete("resourceclaims", "default", "one");
    cluster.report(&[(GPU, &["Newer"])]);
    assert_eq!(cluster.written().await.len(), 1);
    cluster.server.allocate_claim(allocated());
    cluster.report(&[(GPU, &["Newest"])]);
    assert_eq!(
        (cluster.written().await.len(), cluster.counts()),
        (1, [1, 0, 0, 0])
    );
    assert_eq!((cluster.entries(), cluster.codes()), (vec![], vec![]));
}

/// Recorded behaviour: a patch of `status.devices` alone is refused as one of `status.allocation` where the claim was created by a client
/// whose JSON has spaces.
#[tokio::test(start_paused = true)]
async fn spaced_parameters_set_a_condition() {
    let claim = allocated()
        .reserved_for("waits", "pod-uid")
        .with_spaced_parameters();
    let cluster = Cluster::new(claim).await;
    cluster.report(&[(GPU, &["New"])]);
    assert_eq!(
        (cluster.written().await.len(), cluster.counts()),
        (3, [0, 0, 1, 0]),
        "the last read has its pods"
    );
    assert_eq!(*cluster.refusals.lock(), ["Report default/one of waits"]);
    let condition = cluster.conditions.list().remove(0);
    assert_eq!(
        (condition.subject.as_str(), condition.problem.code.as_str()),
        ("default/one", ProblemCode::ClaimStatusUnwritable.as_str())
    );
    cluster.writer.set(Reported::new());
    cluster.written().await;
    assert_eq!(cluster.codes(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn permanent_refusal_is_not_retried() {
    let cluster = Cluster::new(allocated()).await;
    cluster
        .server
        .fail(Fault::Status(422), When::any().verb("patch"));
    cluster.report(&[(GPU, &["New"])]);
    assert_eq!(
        (cluster.written().await.len(), cluster.counts()),
        (2, [0, 0, 1, 0])
    );
    assert_eq!(cluster.codes(), [""; 0]);
    assert!(cluster.refusals.lock().is_empty());
}

#[tokio::test(start_paused = true)]
async fn forbidden_status_backs_off() {
    let cluster = Cluster::new(allocated()).await;
    cluster.server.deny("patch", "resourceclaims/status");
    cluster.report(&[(GPU, &["New"])]);
    tokio::time::sleep(KUBE_FORBIDDEN_PAUSE - Duration::from_secs(1)).await;
    assert_eq!(
        (cluster.written().await.len(), cluster.codes()),
        (2, vec![ProblemCode::ClaimStatusForbidden.to_string()])
    );
    cluster.server.allow_all();
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(
        (cluster.entries(), cluster.codes()),
        (pairs(&[(GPU, "New")]), vec![])
    );
}

#[tokio::test(start_paused = true)]
async fn newest_status_waits_for_server() {
    let cluster = Cluster::new(allocated()).await;
    let fault = cluster.server.fail(Fault::Away, When::any());
    cluster.report(&[(GPU, &["Old"])]);
    tokio::time::sleep(Duration::from_secs(600)).await;
    assert!(cluster.server.requests().len() < 25);
    cluster.report(&[(GPU, &["New"])]);
    cluster.server.lift(fault);
    tokio::time::sleep(limit::KUBE_RETRY_MAX).await;
    assert_eq!(
        (cluster.entries(), cluster.counts()),
        (pairs(&[(GPU, "New")]), [1, 0, 0, 0])
    );
}

/// Claims by their UIDs, each with a driver that reports something.
fn of_claims(claims: &[(&str, &str)]) -> Reported {
    let of_claim = |(uid, driver): &(&str, &str)| {
        reported(
            &ObjectRef::new("default", "one", uid).unwrap(),
            &[(*driver, &["A"])],
        )
    };
    claims.iter().flat_map(of_claim).collect()
}

async fn writer() -> Writer {
    let server = Arc::new(ApiServer::start().await);
    Writer {
        client: over(&server),
        counts: Arc::default(),
        conditions: Conditions::default(),
        on_refused: Arc::new(|_| {}),
        max: limit::STATUSES_MAX,
        parts: BTreeMap::new(),
        held_back: BTreeMap::new(),
    }
}

#[tokio::test]
async fn statuses_are_bounded() {
    let mut writer = writer().await;
    let uids: Vec<_> = (0..=limit::STATUSES_MAX)
        .map(|index| format!("uid-{index}"))
        .collect();
    let claims: Vec<_> = uids.iter().map(|uid| (uid.as_str(), GPU)).collect();
    writer.update(&of_claims(&claims));
    assert_eq!(
        (writer.parts.len(), writer.counts.dropped.get()),
        (limit::STATUSES_MAX, 1)
    );
    // Written ones need no room.
    writer
        .parts
        .values_mut()
        .for_each(|part| part.is_written = true);
    writer.update(&of_claims(&claims));
    assert_eq!(
        (writer.parts.len(), writer.counts.dropped.get()),
        (limit::STATUSES_MAX + 1, 1)
    );
    writer.update(&of_claims(&claims[..2]));
    assert_eq!(writer.parts.len(), 2);
}

#[tokio::test]
async fn forbidden_driver_delays_no_other() {
    let (now, mut writer) = (Instant::now(), writer().await);
    writer.update(&of_claims(&[("a", GPU), ("b", GPU), ("c", NIC)]));
    let first = writer.next(now).unwrap();
    let until = now + KUBE_FORBIDDEN_PAUSE;
    writer.held_back.insert(first.driver.clone(), until);
    writer.part(&first).failures += 1;
    let other = writer.next(now).unwrap();
    assert_eq!(other.claim.uid.as_str(), "c");
    writer.done(&other, true);
    assert_eq!(writer.next(now), Err(Some(until)));
    // One try after the pause; it is not that of the same claim again.
    assert_eq!(writer.next(until).unwrap().claim.uid.as_str(), "b");
    writer.update(&of_claims(&[("c", NIC)]));
    assert_eq!(writer.next(until), Err(None));
    assert!(writer.held_back.is_empty());
}
