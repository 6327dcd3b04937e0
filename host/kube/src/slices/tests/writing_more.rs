//! The same: health, two instances, and a Node object that is another.

use std::time::Duration;

use serde_json::json;
use tokio::time::sleep;

use super::super::content::UNHEALTHY;
use super::super::drivers::Look;
use super::super::planner::Counters;
use super::super::{PoolNames, REFUSED};
use super::server::Server;
use super::writing::{Daemon, GPU, is_there, node, pass, serving};
use super::*;
use nodedock_model::{CounterSet, limit};

fn taints(server: &Server) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for object in server.store().objects() {
        for device in object["spec"]["devices"].as_array().into_iter().flatten() {
            let text = |taint: &serde_json::Value, field: &str| taint[field].as_str().unwrap().to_owned();
            let taints = device["taints"].as_array().into_iter().flatten();
            found.extend(taints.map(|taint| (text(taint, "key"), text(taint, "timeAdded"))));
        }
    }
    found
}

fn healthy() -> Published {
    with_health(published(&[("p", &devices(3))]), "p", 1, HealthState::Healthy)
}

fn unhealthy() -> Published {
    with_health(published(&[("p", &devices(3))]), "p", 1, HealthState::Unhealthy)
}

#[tokio::test(start_paused = true)]
async fn an_unhealthy_device_is_tainted_soon_and_well_again_after_a_while() {
    let server = Server::new();
    let daemon = Daemon::start(&server, serving(GPU, healthy()));
    pass(5).await;
    server.writes();
    daemon.serve(unhealthy());
    pass(1).await;
    let since = taints(&server);
    assert_eq!((server.writes().len(), since.len()), (1, 1));
    // It flaps.
    for _ in 0..10 {
        daemon.serve(healthy());
        pass(10).await;
        daemon.serve(unhealthy());
        pass(10).await;
    }
    server.delete_all();
    pass(2).await;
    assert_eq!((server.writes().len(), taints(&server)), (1, since), "the wipe alone");
    daemon.serve(healthy());
    pass(limit::SLICE_TAINT_HOLD.as_secs() + 2).await;
    assert_eq!((server.writes().len(), taints(&server)), (1, Vec::new()));
    pass(600).await;
    assert_eq!(server.writes(), Vec::<String>::new());
    daemon.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_restart_does_not_take_the_taint_of_a_device_that_flaps() {
    let server = Server::new();
    let daemon = Daemon::start(&server, serving(GPU, unhealthy()));
    pass(5).await;
    let since = taints(&server);
    daemon.stop().await;
    server.writes();
    let daemon = Daemon::start(&server, serving(GPU, healthy()));
    pass(20).await;
    assert_eq!((server.writes().len(), taints(&server)), (0, since));
    pass(20).await;
    assert_eq!((server.writes().len(), taints(&server)), (1, Vec::new()));
    daemon.stop().await;
}

#[tokio::test(start_paused = true)]
async fn two_instances_come_to_the_same_and_rest() {
    let server = Server::new();
    let old = Daemon::start(&server, serving(GPU, published(&[("p", &devices(300))])));
    pass(5).await;
    server.writes();
    let new = Daemon::start(&server, serving(GPU, published(&[("p", &devices(300))])));
    pass(60).await;
    assert_eq!(server.writes(), Vec::<String>::new());
    let had = published(&[("p", &devices(500))]);
    old.serve(had.clone());
    new.serve(had.clone());
    pass(60).await;
    assert!(is_there(&server, &had));
    server.writes();
    pass(600).await;
    let writes = server.writes();
    assert!(writes.len() <= 8, "{writes:?}");
    old.stop().await;
    server.delete_all();
    pass(60).await;
    assert!(is_there(&server, &had));
    new.stop().await;
}

#[tokio::test(start_paused = true)]
async fn nothing_is_written_before_the_node_is_known_and_all_of_it_when_it_is_another() {
    let (server, had) = (Server::new(), published(&[("p", &devices(300))]));
    let daemon = Daemon::start(&server, Look::default());
    daemon.node.send_replace(None);
    daemon.serve(had.clone());
    pass(60).await;
    assert_eq!(server.writes(), Vec::<String>::new());
    daemon.node.send_replace(node("first"));
    pass(5).await;
    assert!(is_there(&server, &had));
    server.writes();
    daemon.node.send_replace(node("second"));
    pass(5).await;
    assert_eq!(server.writes().len(), 3);
    for object in server.store().objects() {
        let owners = json!([{
            "apiVersion": "v1", "kind": "Node", "name": "node-1", "uid": "second", "controller": true,
        }]);
        assert_eq!(
            (&object["metadata"]["ownerReferences"], &object["spec"]["pool"]["generation"]),
            (&owners, &json!(1))
        );
    }
    daemon.stop().await;
}

#[tokio::test(start_paused = true)]
async fn what_a_list_does_not_have_yet_is_read_before_it_is_made_again() {
    let (server, had) = (Server::new(), published(&[("p", &devices(1))]));
    let daemon = Daemon::start(&server, serving(GPU, had.clone()));
    // A list from before the write comes after it.
    let watch = server.lose_watch();
    pass(5).await;
    assert_eq!(server.writes().len(), 1);
    watch[0].send(super::super::view::SliceEvent::Listed(Vec::new())).unwrap();
    pass(5).await;
    assert_eq!(server.writes(), Vec::<String>::new());
    // And one from after it was deleted.
    server.delete_all();
    watch[0].send(super::super::view::SliceEvent::Listed(Vec::new())).unwrap();
    sleep(Duration::from_secs(5)).await;
    assert_eq!(server.writes().len(), 1);
    assert!(is_there(&server, &had));
    daemon.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_native_plugin_that_takes_a_drivers_name_has_its_slices() {
    let (server, had) = (Server::new(), published(&[("p", &devices(2))]));
    let daemon = Daemon::start(&server, serving(GPU, had));
    pass(5).await;
    let present = std::collections::BTreeSet::from([driver(GPU)]);
    daemon.drivers.send_replace(Look {
        native: present.clone(),
        present,
        is_settled: true,
        ..Look::default()
    });
    pass(5).await;
    server.writes();
    server.delete_all();
    pass(60).await;
    assert_eq!(server.writes(), Vec::<String>::new());
    assert_eq!(daemon.report.pools(), Default::default());
    daemon.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_name_that_is_too_long_is_told_and_the_other_pools_are_written() {
    let server = Server::new();
    let long = ["a".repeat(60).as_str(); 4].join(".");
    let names = super::super::PoolNames::OfNode("node-1".repeat(5));
    let look = serving(GPU, published(&[(&long, &devices(1)), ("q", &devices(1))]));
    let daemon = Daemon::start_named(&server, look, names);
    pass(5).await;
    let keys: Vec<_> = server.store().held().map(|held| held.key.pool.to_string()).collect();
    assert_eq!(keys, [format!("{}/q", "node-1".repeat(5))]);
    assert_eq!(daemon.codes(), [super::super::REFUSED]);
    daemon.serve(published(&[("q", &devices(1))]));
    pass(5).await;
    assert_eq!(daemon.codes(), Vec::<String>::new());
    daemon.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_taint_of_health_that_nobody_answers_for_goes_after_a_while() {
    let server = Server::new();
    let daemon = Daemon::start(&server, serving(GPU, healthy()));
    pass(60).await;
    // By hand, or by an instance that is no more; our driver has nothing new to say from here on.
    let name = server.store().held().next().unwrap().name;
    server.edit(&name, |object| {
        object["spec"]["devices"][0]["taints"] = json!([{ "key": UNHEALTHY, "effect": "NoSchedule" }]);
    });
    pass(limit::SLICE_TAINT_HOLD.as_secs() / 2).await;
    assert_eq!(taints(&server).len(), 1);
    pass(limit::SLICE_TAINT_HOLD.as_secs()).await;
    assert_eq!(taints(&server), Vec::new());
    daemon.stop().await;
}

#[tokio::test(start_paused = true)]
async fn a_pool_that_an_old_server_cannot_take_is_written_when_a_newer_one_is_there() {
    let server = Server::new();
    server.wants_counters(Counters::Together);
    let set = |value: &str| CounterSet {
        name: "memory".to_owned(),
        counters: [("bytes".to_owned(), value.to_owned())].into(),
    };
    let mut pool = devices(100);
    pool.shared_counters = vec![set("100")];
    pool.devices.values_mut().for_each(|device| device.consumes = vec![set("1")]);
    let had = published(&[("p", &pool)]);
    let daemon = Daemon::start(&server, serving(GPU, had.clone()));
    pass(60).await;
    assert_eq!((server.writes().len(), daemon.codes()), (0, vec![REFUSED.to_owned()]));
    server.wants_counters(Counters::Apart);
    server.list_again();
    pass(5).await;
    assert!(is_there(&server, &had));
    assert_eq!(daemon.codes(), Vec::<String>::new());
    daemon.stop().await;
}

#[tokio::test(start_paused = true)]
async fn what_was_said_of_a_name_that_is_too_long_is_over_with_its_driver() {
    let (server, long) = (Server::new(), ["a".repeat(60).as_str(); 4].join("."));
    let had = published(&[(long.as_str(), &devices(1))]);
    let names = PoolNames::OfNode("n".repeat(60));
    let daemon = Daemon::start_named(&server, serving(GPU, had.clone()), names);
    pass(5).await;
    assert_eq!(daemon.codes(), [REFUSED]);
    daemon.drivers.send_replace(Look { is_settled: true, ..Look::default() });
    pass(5).await;
    assert_eq!(daemon.codes(), Vec::<String>::new());
    daemon.serve(had);
    pass(5).await;
    assert_eq!(daemon.codes(), [REFUSED]);
    daemon.stop().await;
}
