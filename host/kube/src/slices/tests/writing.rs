//! The task that writes, with a server and drivers of our making. The clock is turned, not waited for.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use serde_json::json;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

use super::super::drivers::Look;
use super::super::remote::SliceEvents;
use super::super::report::Report;
use super::super::{CONTESTED, FIELDS_DROPPED, REFUSED};
use super::super::{PoolNames, SliceError, SliceParts, SliceSettings, start};
use super::server::{Server, Told, foreign};
use super::*;
use crate::facts::NodeFacts;
use nodedock_base::conditions::Conditions;
use nodedock_base::tasks::Tasks;
use nodedock_model::{ObjectName, limit};

/// A daemon on node-1.
pub(super) struct Daemon {
    pub(super) drivers: watch::Sender<Look>,
    pub(super) node: watch::Sender<Option<NodeFacts>>,
    pub(super) conditions: Conditions,
    pub(super) report: Report,
    tasks: Tasks,
}

pub(super) const GPU: &str = "gpu.example.com";

pub(super) fn node(uid: &str) -> Option<NodeFacts> {
    Some(NodeFacts { name: ObjectName::new("node-1").unwrap(), uid: Uid::new(uid).unwrap() })
}

pub(super) fn serving(driver: &str, published: Published) -> Look {
    let serving = BTreeMap::from([(super::driver(driver), arc(published))]);
    Look { present: serving.keys().cloned().collect(), serving, is_settled: true, ..Look::default() }
}

impl Daemon {
    pub(super) fn start(server: &Server, look: Look) -> Self {
        Self::start_named(server, look, PoolNames::Plain)
    }

    pub(super) fn start_named(server: &Server, look: Look, names: PoolNames) -> Self {
        let ((drivers, told), (node, facts)) = (watch::channel(look), watch::channel(node("uid-of-node-1")));
        let (conditions, report, tasks) = (Conditions::default(), Report::default(), Tasks::new());
        start(SliceParts {
            api: Arc::new(server.clone()),
            events: SliceEvents { events: server.follow(), following: None },
            drivers: Box::new(Told(told)),
            node: facts,
            doubt_node: Box::new(|| ()),
            settings: SliceSettings { names, unhealthy: TaintEffect::NoSchedule, with_resource_pools: true },
            conditions: conditions.clone(),
            report: report.clone(),
            tasks: tasks.clone(),
        });
        Self { drivers, node, conditions, report, tasks }
    }

    pub(super) fn serve(&self, published: Published) {
        self.drivers.send_replace(serving(GPU, published));
    }

    pub(super) async fn stop(self) {
        assert!(self.tasks.drain(Duration::from_secs(1)).await);
    }

    pub(super) fn codes(&self) -> Vec<String> {
        self.conditions.list().into_iter().map(|condition| condition.problem.code).collect()
    }
}

/// Turns the clock on, with time for everybody to do what is due.
pub(super) async fn pass(seconds: u64) {
    sleep(Duration::from_secs(seconds)).await;
}

pub(super) fn is_there(server: &Server, published: &Published) -> bool {
    let of = |pool: &Pool| super::super::content::of_pool(pool, &BTreeSet::new(), TaintEffect::NoSchedule);
    let pools = &published.inventory.pools;
    pools.iter().all(|(name, pool)| visible(&server.store(), &key(GPU, name.as_str())) == Some(of(pool)))
}

#[tokio::test(start_paused = true)]
async fn what_a_driver_has_is_written_and_what_does_not_change_is_left() {
    let (server, had) = (Server::new(), published(&[("p", &devices(200)), ("q", &devices(1))]));
    let daemon = Daemon::start(&server, serving(GPU, had.clone()));
    pass(5).await;
    assert!(is_there(&server, &had));
    assert_eq!(server.writes().len(), 3);
    daemon.serve(had.clone());
    pass(700).await;
    assert_eq!(server.writes(), Vec::<String>::new());
    let status = daemon.report.pool(&key(GPU, "p")).unwrap();
    assert_eq!((status.is_current, status.slices, status.devices, status.generation), (true, 2, 200, 1));
    daemon.stop().await;
    assert_eq!(server.store().held().count(), 3, "they stay when we stop");
}

#[tokio::test(start_paused = true)]
async fn devices_that_change_all_the_time_cost_a_write_a_second() {
    let server = Server::new();
    let daemon = Daemon::start(&server, serving(GPU, published(&[("p", &devices(1))])));
    pass(5).await;
    server.writes();
    for turn in 0..1000 {
        let mut pool = devices(1);
        pool.devices.get_mut(&device_name(0)).unwrap().taints = vec![taint(&turn.to_string())];
        daemon.serve(published(&[("p", &pool)]));
        sleep(Duration::from_millis(10)).await;
    }
    pass(2).await;
    let writes = server.writes().len();
    assert!((9..=13).contains(&writes), "{writes}");
    daemon.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_kubelet_that_starts_deletes_everything_and_it_is_written_again_at_once() {
    let (server, had) = (Server::new(), published(&[("p", &devices(300)), ("q", &devices(2))]));
    let daemon = Daemon::start(&server, serving(GPU, had.clone()));
    pass(5).await;
    server.delete_all();
    sleep(2 * limit::SLICE_SETTLE).await;
    assert!(is_there(&server, &had));
    assert_eq!((server.writes().len(), daemon.report.repairs()), (8, 2));
    // One that is started anew all the time is no reason to turn in circles.
    let start = Instant::now();
    while start.elapsed() < Duration::from_secs(120) {
        server.delete_all();
        sleep(Duration::from_millis(500)).await;
    }
    let writes = server.writes().len();
    assert!((20..=50).contains(&writes), "{writes}");
    assert!(daemon.codes().contains(&CONTESTED.to_owned()));
    pass(limit::SLICE_CALM.as_secs() + limit::SLICE_REPAIR_MAX.as_secs()).await;
    assert!(is_there(&server, &had));
    assert_eq!(daemon.codes(), Vec::<String>::new());
    daemon.stop().await;
}

#[tokio::test(start_paused = true)]
async fn what_others_change_is_mended_and_slices_of_other_drivers_are_left_alone() {
    let (server, had) = (Server::new(), published(&[("p", &devices(300))]));
    server.create(foreign("other.example.com", "p", "node-1"));
    let daemon = Daemon::start(&server, serving(GPU, had.clone()));
    pass(5).await;
    server.writes();
    let name = server.store().held().find(|held| held.key.driver.as_str() == GPU).unwrap().name;
    server.edit(&name, |object| drop(object["spec"]["devices"].as_array_mut().unwrap().pop()));
    pass(5).await;
    assert_eq!(server.writes(), [format!("update {name}")]);
    server.create(foreign(GPU, "p", "node-1"));
    server.create(foreign(GPU, "none-of-ours", "node-1"));
    pass(60).await;
    assert!(is_there(&server, &had));
    let left: Vec<_> = server.store().held().map(|held| held.key.to_string()).collect();
    assert_eq!(left.iter().filter(|key| *key == "other.example.com/p").count(), 1);
    assert_eq!(left.len(), 4, "{left:?}");
    daemon.stop().await;
}

#[tokio::test(start_paused = true)]
async fn after_a_restart_only_what_differs_is_written() {
    let (server, mut pool) = (Server::new(), devices(300));
    let daemon = Daemon::start(&server, serving(GPU, published(&[("p", &pool)])));
    pass(5).await;
    daemon.stop().await;
    server.writes();
    // The driver is there, and does not serve yet.
    let present = BTreeSet::from([driver(GPU)]);
    let daemon = Daemon::start(&server, Look { present, is_settled: true, ..Look::default() });
    pass(600).await;
    assert_eq!(server.writes(), Vec::<String>::new());
    pool.devices.get_mut(&device_name(130)).unwrap().allow_multiple_allocations = true;
    let had = published(&[("p", &pool)]);
    daemon.serve(had.clone());
    pass(5).await;
    assert_eq!(server.writes().len(), 1);
    assert!(is_there(&server, &had));
    // It is lost, and what was written is written again nevertheless.
    let present = BTreeSet::from([driver(GPU)]);
    daemon.drivers.send_replace(Look { present, is_settled: true, ..Look::default() });
    pass(60).await;
    server.delete_all();
    pass(5).await;
    assert!(is_there(&server, &had));
    daemon.stop().await;
}

#[tokio::test(start_paused = true)]
async fn slices_go_when_their_driver_is_gone_for_sure_and_not_before() {
    let (server, had) = (Server::new(), published(&[("p", &devices(200))]));
    server.create(foreign("native.example.com", "p", "node-1"));
    let daemon = Daemon::start(&server, serving(GPU, had.clone()));
    pass(5).await;
    // A file that is being replaced is away for a moment.
    daemon.drivers.send_replace(Look { is_settled: true, ..Look::default() });
    pass(5).await;
    daemon.serve(had.clone());
    pass(60).await;
    assert!(is_there(&server, &had));
    daemon.stop().await;

    let nameless = vec!["broken.wasm".to_owned()];
    let daemon = Daemon::start(&server, Look::default());
    pass(60).await;
    assert!(is_there(&server, &had), "not all files were looked at");
    daemon.drivers.send_replace(Look { is_settled: true, nameless, ..Look::default() });
    pass(60).await;
    assert!(is_there(&server, &had), "it may be the one that cannot be read");
    assert_eq!(daemon.codes(), [super::super::KEPT]);
    daemon.drivers.send_replace(Look { is_settled: true, ..Look::default() });
    pass(60).await;
    let left: Vec<_> = server.store().held().map(|held| held.key.to_string()).collect();
    assert_eq!(left, ["native.example.com/p"]);
    assert_eq!(daemon.codes(), Vec::<String>::new());
    daemon.serve(had.clone());
    pass(5).await;
    assert!(is_there(&server, &had), "it is back");
    daemon.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_pool_that_is_refused_says_why_and_keeps_no_other_waiting() {
    let server = Server::new();
    let mut bad = devices(1);
    bad.devices.insert(DeviceName::new("bad").unwrap(), Device::default());
    let daemon = Daemon::start(&server, serving(GPU, published(&[("bad", &bad), ("good", &devices(2))])));
    pass(5).await;
    assert!(is_there(&server, &published(&[("good", &devices(2))])));
    let [condition] = &daemon.conditions.list()[..] else { panic!() };
    assert_eq!(
        (condition.problem.code.as_str(), condition.subject.as_str()),
        (REFUSED, "gpu.example.com/bad")
    );
    assert!(condition.problem.message.contains("spec.devices[0].name: Invalid value"), "{condition:?}");
    server.writes();
    pass(600).await;
    let tries = server.writes().len();
    assert!((4..=10).contains(&tries), "{tries}");
    // What is another now is tried at once.
    daemon.serve(published(&[("bad", &devices(3)), ("good", &devices(2))]));
    pass(3).await;
    assert!(is_there(&server, &published(&[("bad", &devices(3))])));
    assert_eq!(daemon.codes(), Vec::<String>::new());
    daemon.stop().await;
}

#[tokio::test(start_paused = true)]
async fn fields_that_a_server_leaves_out_are_named_and_not_fought_over() {
    let server = Server::new();
    server.store().unknown = vec!["taints"];
    let mut pool = devices(200);
    pool.devices.values_mut().for_each(|device| device.taints = vec![taint("a")]);
    let daemon = Daemon::start(&server, serving(GPU, published(&[("p", &pool)])));
    pass(600).await;
    assert_eq!(server.writes().len(), 4);
    let [condition] = &daemon.conditions.list()[..] else { panic!() };
    assert_eq!((condition.problem.code.as_str(), condition.subject.as_str()), (FIELDS_DROPPED, GPU));
    assert!(condition.problem.message.contains("devices[].taints"), "{condition:?}");
    server.list_again();
    pass(60).await;
    assert_eq!(server.writes(), Vec::<String>::new());
    daemon.serve(published(&[("p", &devices(200))]));
    pass(60).await;
    assert_eq!(daemon.codes(), Vec::<String>::new());
    daemon.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_server_that_is_away_for_minutes_is_asked_less_and_less_and_then_gets_everything() {
    let (server, had) = (Server::new(), published(&[("p", &devices(300))]));
    let daemon = Daemon::start(&server, serving(GPU, published(&[("p", &devices(1))])));
    pass(5).await;
    server.writes();
    server.set_away(true);
    let watch = server.lose_watch();
    daemon.serve(had.clone());
    pass(600).await;
    let tries = server.writes().len();
    assert!((5..=15).contains(&tries), "{tries}");
    assert!(!daemon.report.pool(&key(GPU, "p")).unwrap().is_current);
    // A kubelet starts meanwhile.
    server.delete_all();
    server.set_away(false);
    server.find_watch(watch);
    pass(limit::SLICE_RETRY_MAX.as_secs()).await;
    assert!(is_there(&server, &had));
    assert!(daemon.report.pool(&key(GPU, "p")).unwrap().is_current);
    daemon.stop().await;
}

#[tokio::test(start_paused = true)]
async fn conflicts_are_read_and_written_over() {
    let (server, had) = (Server::new(), published(&[("p", &devices(300))]));
    let daemon = Daemon::start(&server, serving(GPU, published(&[("p", &devices(200))])));
    pass(5).await;
    // Nobody tells of the change: the write finds out.
    let watch = server.lose_watch();
    let name = server.store().held().next().unwrap().name;
    server.edit(&name, |object| object["metadata"]["annotations"] = json!({ "a": "b" }));
    server.fail([SliceError::Conflict("generated name is taken".to_owned())]);
    daemon.serve(had.clone());
    pass(30).await;
    assert!(is_there(&server, &had));
    let slice = server.store().objects().next().unwrap().clone();
    assert_eq!(slice["metadata"]["annotations"], json!({ "a": "b" }));
    // Nor of the deletion.
    server.delete_one(&name);
    daemon.serve(published(&[("p", &devices(500))]));
    pass(30).await;
    assert!(is_there(&server, &published(&[("p", &devices(500))])));
    server.find_watch(watch);
    daemon.stop().await;
}
