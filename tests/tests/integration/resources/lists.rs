//! Lists of devices that are absurd, and plugins that come and change too fast.

use std::time::Duration;

use native_device_plugin::{Device, Options as PluginOptions, Plugin, Script, api};
use nodedock_tests::Daemon;
use tokio::time::interval;

use super::agreement::agree;
use super::{
    NIC, calling, freed, ids, limited, nics, ready, started, until_allocatable, until_resource, with_nics,
};

const OTHER: &str = "example.com/other";
const FAULTY: &str = "device-list-faulty";

fn raw(id: &str, health: &str) -> api::Device {
    api::Device { id: id.to_owned(), health: health.to_owned(), topology: None }
}

#[tokio::test]
async fn devices_without_an_id_or_twice_in_a_list_are_said_and_the_others_are_given() {
    let daemon = Daemon::start().await;
    let plugin = with_nics(&daemon, Script::ok(), 1).await;
    plugin.list_raw(vec![
        raw("", "Healthy"),
        raw("a", "Healthy"),
        raw("a", "Unhealthy"),
        raw("b", "Healthy"),
        raw("b", "Healthy"),
        raw("c", "healthy"),
        raw(&"x".repeat(5000), "Healthy"),
    ]);
    let [condition] = daemon.until_conditions(&[FAULTY]).await.try_into().expect("one condition");
    let problem = condition.problem.expect("a condition has a problem");
    for words in [NIC, "1 without an id", "2 are listed again", "1 with an id of more"] {
        assert!(problem.message.contains(words), "{words} in {problem:?}");
    }
    until_resource(&daemon, NIC, |nic| (nic.capacity, nic.allocatable) == (3, 1)).await;
    assert_eq!(ids(&ready(&daemon, limited("one", &[(NIC, 1)])).await, "main", NIC), ["b"]);
    agree(&daemon).await;
    plugin.list(nics(2));
    daemon.until_conditions(&[]).await;
    until_allocatable(&daemon, NIC, 2).await;
    agree(&daemon).await;
}

#[tokio::test]
async fn of_a_hundred_thousand_devices_the_first_ten_thousand_are_used() {
    let daemon = Daemon::start().await;
    let plugin = with_nics(&daemon, Script::ok(), 1).await;
    plugin.list((0..100_000).map(|n| Device::healthy(&format!("nic-{n:06}"))).collect());
    let [condition] = daemon.until_conditions(&[FAULTY]).await.try_into().expect("one condition");
    let problem = condition.problem.expect("a condition has a problem");
    assert!(problem.message.contains(NIC) && problem.message.contains("90000 beyond"), "{problem:?}");
    until_allocatable(&daemon, NIC, 10_000).await;
    let answer = ready(&daemon, limited("one", &[(NIC, 4096)])).await;
    assert_eq!(ids(&answer, "main", NIC).len(), 4096);
    assert_eq!(agree(&daemon).await.len(), 4096);
    freed(&daemon, "one").await;
}

#[tokio::test]
async fn devices_that_flap_a_thousand_times_a_second_hold_up_no_other_resource() {
    let daemon = Daemon::start().await;
    let flapping = with_nics(&daemon, Script::ok(), 100).await;
    let _other = started(&daemon, calling(&daemon, OTHER), Script::ok(), nics(2)).await;
    let lists = [nics(100), (0..100).map(|n| Device::unhealthy(&format!("nic-{n}"))).collect()];
    let flap = async {
        let mut pace = interval(Duration::from_millis(1));
        for turn in 0.. {
            pace.tick().await;
            flapping.list(lists[turn % 2].clone());
        }
    };
    let allocate = async {
        for round in 0..30 {
            let name = format!("p{round}");
            ready(&daemon, limited(&name, &[(OTHER, 2)])).await;
            assert_eq!(freed(&daemon, &name).await.len(), 1);
            // Given or refused: the response comes at once either way.
            let answer = daemon.prepare(limited(&name, &[(NIC, 1)])).await;
            assert_eq!(answer.resources.len(), 1);
            freed(&daemon, &name).await;
        }
    };
    tokio::select! {
        () = flap => unreachable!("it has no end"),
        () = allocate => {}
    }
    flapping.list(nics(7));
    until_allocatable(&daemon, NIC, 7).await;
    assert!(agree(&daemon).await.is_empty());
    ready(&daemon, limited("after", &[(NIC, 7)])).await;
}

#[tokio::test]
async fn in_a_storm_of_registrations_every_resource_gets_its_newest_plugin() {
    let daemon = Daemon::start().await;
    let holder = with_nics(&daemon, Script::ok(), 2).await;
    let answer = ready(&daemon, limited("one", &[(NIC, 2)])).await;
    let own_socket = |resource: &str, n: usize| PluginOptions {
        endpoint: format!("s{n}.sock"),
        ..calling(&daemon, resource)
    };
    // Fifty of one resource and fifty of resources of their own, all at once.
    let same = (0..50).map(|n| Plugin::start(own_socket(NIC, n), Script::ok(), nics(2)));
    let mine = (50..100).map(|n| {
        let resource = format!("example.com/r{n}");
        let options = own_socket(&resource, n);
        async move { Plugin::start(options, Script::ok(), nics(1)).await }
    });
    let (same, mine) = tokio::join!(futures::future::join_all(same), futures::future::join_all(mine));
    for refused in same.iter().filter_map(|plugin| plugin.as_ref().err()) {
        assert!(refused.message().contains("a newer registration of example.com/nic"), "{refused:?}");
    }
    assert!(same.iter().any(Result::is_ok), "the last one counts");
    for (n, plugin) in (50..100).zip(&mine) {
        assert!(plugin.is_ok(), "{n}: {:?}", plugin.as_ref().err());
        until_allocatable(&daemon, &format!("example.com/r{n}"), 1).await;
    }
    drop(holder);
    until_allocatable(&daemon, NIC, 2).await;
    assert_eq!(ready(&daemon, limited("one", &[(NIC, 2)])).await, answer);
    freed(&daemon, "one").await;
    ready(&daemon, limited("two", &[(NIC, 2), ("example.com/r77", 1)])).await;
    assert_eq!(agree(&daemon).await.len(), 3);
}

#[tokio::test]
async fn a_plugin_that_ends_its_list_again_and_again_is_followed_again() {
    let daemon = Daemon::start().await;
    let plugin = with_nics(&daemon, Script::ok(), 2).await;
    for count in 3..6 {
        plugin.fail_lists(tonic::Status::internal("no list today"));
        plugin.list(nics(count));
        until_allocatable(&daemon, NIC, count).await;
    }
    ready(&daemon, limited("one", &[(NIC, 5)])).await;
}
