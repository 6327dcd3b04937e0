//! Device plugins on real sockets beside a kubelet that is played, and on a paused clock where only time matters.

mod allocations;
mod kubelet;
mod registrations;
mod unused;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use tokio::sync::Notify;

use super::offering::NOT_KEPT;
use super::*;
use nodedock_model::{ChangedKind, PluginDevice};

use kubelet::Kubelet;

/// Longer than any of it takes, and shorter than a person waits.
const PATIENCE: Duration = Duration::from_secs(20);

fn resource(short: &str) -> ExtendedResource {
    ExtendedResource::new(format!("example.com/{short}")).unwrap()
}

fn driver(short: &str) -> DriverName {
    DriverName::new(format!("{short}.example.com")).unwrap()
}

/// Ids `p/a`, `p/b` … for the letters.
fn ids(letters: &str) -> BTreeSet<String> {
    letters.chars().map(|letter| format!("p/{letter}")).collect()
}

/// Devices by letters; those in capitals are not healthy.
fn offer(of: &str, letters: &str) -> PoolOffer {
    let device = |letter: char| PluginDevice {
        id: format!("p/{}", letter.to_ascii_lowercase()),
        healthy: letter.is_ascii_lowercase(),
        numa_nodes: vec![0],
    };
    PoolOffer { driver: driver(of), devices: letters.chars().map(device).collect() }
}

/// Pools as a test wants them.
struct Pools {
    now: Mutex<Pooled>,
    changed: watch::Sender<u64>,
    driver: Mutex<DriverNow>,
}

impl Pools {
    fn new() -> Self {
        Self { now: Mutex::default(), changed: watch::Sender::new(0), driver: Mutex::default() }
    }

    fn driver_is(&self, driver: DriverNow) {
        *self.driver.lock().unwrap() = driver;
        self.changed.send_modify(|count| *count += 1);
    }

    fn set(&self, pooled: Pooled) {
        *self.now.lock().unwrap() = pooled;
        self.changed.send_modify(|count| *count += 1);
    }

    fn offer(&self, letters: &str) {
        let offers = Offers::from([(resource("gpu"), offer("gpu", letters))]);
        self.set(Pooled { offers, ..Pooled::default() });
    }
}

impl PooledResources for Pools {
    fn now(&self) -> Pooled {
        self.now.lock().unwrap().clone()
    }

    fn driver(&self, _: &DriverName) -> DriverNow {
        *self.driver.lock().unwrap()
    }

    fn follow(&self) -> Vec<watch::Receiver<u64>> {
        vec![self.changed.subscribe()]
    }
}

/// A claim manager that prepares everything at once, and says what it was asked.
#[derive(Default)]
struct PlayedClaims {
    held: Mutex<BTreeMap<Uid, HeldDevices>>,
    calls: Mutex<Vec<String>>,
    called: Notify,
    refusal: Mutex<Option<Problem>>,
    /// Prepares and unprepares wait for it, if it is there.
    gate: Mutex<Option<Arc<tokio::sync::Semaphore>>>,
    prepared: AtomicU64,
}

impl PlayedClaims {
    fn said(&self, what: &str, devices: &BTreeSet<String>) {
        let letters: String = devices.iter().map(|id| id.trim_start_matches("p/")).collect();
        self.calls.lock().unwrap().push(format!("{what} {letters}"));
        self.called.notify_one();
    }

    /// What was asked since the last time.
    fn calls(&self) -> Vec<String> {
        std::mem::take(&mut *self.calls.lock().unwrap())
    }

    async fn pass(&self) {
        let gate = self.gate.lock().unwrap().clone();
        if let Some(gate) = gate {
            gate.acquire().await.unwrap().forget();
        }
    }

    fn refused(&self) -> Result<(), Problem> {
        self.refusal.lock().unwrap().clone().map_or(Ok(()), Err)
    }
}

#[async_trait]
impl PluginClaims for PlayedClaims {
    async fn prepare(
        &self,
        driver: &DriverName,
        claim: Claim,
        _: Arc<str>,
    ) -> Result<PreparedDevices, Problem> {
        assert!(is_plugin_claim(&claim.id));
        let devices = claim.allocation.unwrap().devices;
        let ids: BTreeSet<_> = devices.iter().map(|device| device_id(&device.pool, &device.device)).collect();
        self.said("prepare", &ids);
        self.pass().await;
        self.refused()?;
        let held_letters = ids.iter().map(|id| id.trim_start_matches("p/")).collect();
        let held = HeldDevices { claim: claim.id.clone(), driver: driver.clone(), devices: ids };
        self.held.lock().unwrap().insert(claim.id.uid, held);
        self.prepared.fetch_add(1, Relaxed);
        let answer = |device: &nodedock_model::AllocatedDevice| KubeletDevice {
            requests: Vec::new(),
            pool: device.pool.clone(),
            device: device.device.clone(),
            cdi: vec!["example.com/gpu=all".to_owned(), format!("example.com/gpu={}", device.device)],
            share_id: None,
        };
        let annotations = [("example.com/first".to_owned(), held_letters)].into();
        Ok(PreparedDevices { devices: devices.iter().map(answer).collect(), annotations })
    }

    async fn unprepare(&self, _: &DriverName, claim: &ObjectRef, _: Arc<str>) -> Result<(), Problem> {
        let devices = self.held.lock().unwrap().get(&claim.uid).map(|held| held.devices.clone());
        self.said("unprepare", &devices.unwrap_or_default());
        self.pass().await;
        self.refused()?;
        self.held.lock().unwrap().remove(&claim.uid);
        Ok(())
    }

    fn held(&self) -> Vec<HeldDevices> {
        self.held.lock().unwrap().values().cloned().collect()
    }
}

/// Claims that are not a kubelet's device manager's, by device.
#[derive(Default)]
struct Others(Mutex<BTreeMap<String, ObjectRef>>);

impl DeviceHolders for Others {
    fn holders(&self, _: &DriverName, pool: &str, device: &str) -> Vec<ObjectRef> {
        self.0.lock().unwrap().get(&format!("{pool}/{device}")).cloned().into_iter().collect()
    }
}

/// A kubelet's root with all that device plugins stand on.
struct Bench {
    dir: tempfile::TempDir,
    pools: Arc<Pools>,
    claims: Arc<PlayedClaims>,
    others: Arc<Others>,
    changes: Changes,
    conditions: Conditions,
}

impl Bench {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join(FOLDER)).unwrap();
        Self {
            dir,
            pools: Arc::new(Pools::new()),
            claims: Arc::default(),
            others: Arc::default(),
            changes: Changes::default(),
            conditions: Conditions::default(),
        }
    }

    fn folder(&self) -> PathBuf {
        self.dir.path().join(FOLDER)
    }

    /// The device plugins of one run of the daemon.
    fn run(&self, instance: Option<&str>) -> Run {
        let tasks = Tasks::new();
        let memory = format!("devices-{}.json", instance.unwrap_or_default());
        let plugins = Plugins::new(PluginsParts {
            kubelet_root: self.dir.path().to_owned(),
            instance: instance.map(|uid| Uid::new(uid).unwrap()),
            own_pod: None,
            pools: self.pools.clone(),
            claims: self.claims.clone(),
            holders: self.others.clone(),
            changes: self.changes.clone(),
            conditions: self.conditions.clone(),
            tasks: tasks.clone(),
            memory: self.dir.path().join(memory),
        })
        .unwrap();
        plugins.start();
        Run { plugins, tasks }
    }

    fn claims_changed(&self) {
        self.changes.tell(ChangedKind::Claim, "a", "prepared");
    }

    /// Our sockets in the kubelet's folder.
    fn sockets(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.folder()).unwrap().map(|entry| entry.unwrap().file_name());
        let names = entries.map(|name| name.into_string().unwrap());
        names.filter(|name| name.starts_with("nodedock-") && name.ends_with(".sock")).collect()
    }

    fn problem(&self, code: &str) -> Option<String> {
        let conditions = self.conditions.list().into_iter();
        conditions.map(|known| known.problem).find(|known| known.code == code).map(|known| known.message)
    }
}

struct Run {
    plugins: Plugins,
    tasks: Tasks,
}

impl Run {
    async fn stop(self) {
        assert!(self.tasks.drain(PATIENCE).await, "tasks do not end");
    }

    fn registration(&self) -> Option<Registration> {
        self.plugins.status().into_iter().next().map(|status| status.registration)
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        self.tasks.stop();
    }
}

/// Waits for something that nobody tells.
async fn until(what: &str, mut is: impl FnMut() -> bool) {
    let waited = async {
        while !is() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    assert!(tokio::time::timeout(PATIENCE, waited).await.is_ok(), "{what}");
}

#[tokio::test]
async fn a_memory_that_cannot_be_written_is_said_and_nothing_else_suffers() {
    let bench = Bench::new();
    std::fs::create_dir(bench.dir.path().join("devices-.json")).unwrap();
    bench.pools.offer("a");
    let mut kubelet = Kubelet::start(&bench.folder());
    let run = bench.run(None);
    assert_eq!(kubelet.listed().await, "a");
    until("it is not said", || bench.problem(NOT_KEPT).is_some()).await;
    run.stop().await;
}
