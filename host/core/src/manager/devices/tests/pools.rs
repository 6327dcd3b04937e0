//! Pools of drivers under a resource's name, and claims that take from them as well.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::sync::watch;
use tokio::time::pause;

use crate::driver::Published;
use crate::manager::claims::fixtures as claims;
use crate::manager::devices::ResourceSource;
use crate::manager::devices::fixtures::{driver, ids, pod, resource, uid};
use crate::manager::pool_claims;
use crate::manager::tests::scene::{Daemon, Home, app, container, device_ends, device_request};
use nodedock_model::{
    Claim, Consumer, ContainerKind, Device, DeviceHealth, DeviceName, DriverKind, HealthState, Inventory,
    ObjectRef, PodAllocation, Pool, PoolName,
};

/// A driver's pool `pool` with devices of NUMA nodes, under the name `example.com/SHORT`.
pub(super) fn published(short: &str, devices: &[(&str, &[u32])]) -> watch::Sender<Arc<Published>> {
    let device = |(name, nodes): &(&str, &[u32])| {
        (DeviceName::new(name).unwrap(), Device { numa_nodes: nodes.to_vec(), ..Device::default() })
    };
    let pool = Pool {
        devices: devices.iter().map(device).collect(),
        extended_resource: Some(resource(short)),
        ..Pool::default()
    };
    let pools = BTreeMap::from([(PoolName::new("pool").unwrap(), pool)]);
    watch::Sender::new(Arc::new(Published { inventory: Inventory { pools }, ..Published::default() }))
}

/// A daemon with the pool of `gpu.example.com`.
async fn start(home: &Home, pools: &watch::Sender<Arc<Published>>) -> Daemon {
    let daemon = home.start_at_once();
    daemon.start_devices();
    daemon.serve_any(&driver("gpu"), DriverKind::Wasm, None, Some(pools.subscribe()), "");
    daemon.until(|daemon| daemon.view("gpu").is_some_and(|view| view.active)).await;
    daemon
}

/// The pool claims of a pod, each once.
fn claims_of(record: &PodAllocation) -> Vec<Claim> {
    let claims = record.entries.iter().filter_map(|entry| pool_claims::claim_of(entry, &record.pod));
    let claims: BTreeMap<_, _> = claims.map(|claim| claim.map(|c| (c.id.uid.clone(), c)).unwrap()).collect();
    claims.into_values().collect()
}

fn stranger() -> ObjectRef {
    ObjectRef::new("default", "other-claim", "uid-claim").unwrap()
}

#[tokio::test]
async fn devices_of_a_pool_are_given_with_a_claim_of_fewest_numa_nodes() {
    let home = Home::new();
    let pools = published("gpu", &[("a0", &[0]), ("a1", &[1]), ("b0", &[0]), ("b1", &[1]), ("c1", &[1])]);
    let daemon = start(&home, &pools).await;
    let outcomes = daemon.allocate("a", &app(&[("gpu", 2)])).await;
    assert_eq!(device_ends(&outcomes), ["pool/a0,pool/b0"]);
    assert_eq!(daemon.commits(), 1, "there is no answer to wait for");
    let record = daemon.manager.allocation("uid-a").unwrap();
    let claim = pool_claims::claim_of(&record.entries[0], &record.pod).unwrap().unwrap();
    let allocation = claim.allocation.as_ref().unwrap();
    let given: Vec<_> = allocation
        .devices
        .iter()
        .map(|d| format!("{}/{}/{} for {}", d.driver, d.pool, d.device, d.request))
        .collect();
    assert_eq!(
        given,
        ["gpu.example.com/pool/a0 for extended-resource", "gpu.example.com/pool/b0 for extended-resource"]
    );
    assert_eq!((claim.reserved_for, claim.owner_pod), (vec![Consumer::of_pod(&record.pod)], Some(uid("a"))));
    assert!(
        claim.id.name.as_str().starts_with("a-") && claim.id.namespace == record.pod.namespace,
        "{}",
        claim.id
    );

    let again = daemon.allocate("a", &app(&[("gpu", 2)])).await;
    assert_eq!(again, outcomes);
    daemon.free("a").await.unwrap();
    assert_eq!(daemon.allocate("a", &app(&[("gpu", 2)])).await, outcomes);
    let second = daemon.manager.allocation("uid-a").unwrap();
    assert_eq!(second.entries[0].claim, record.entries[0].claim, "the same claim whenever it is asked for");
}

#[tokio::test]
async fn a_pod_gets_no_device_that_is_allocated_to_a_claim() {
    let home = Home::new();
    let daemon = start(&home, &published("gpu", &[("0", &[]), ("1", &[])])).await;
    daemon.source.allocate(claims::claim("one", &["gpu/0"], &[]));
    assert_eq!(device_ends(&daemon.allocate("a", &app(&[("gpu", 1)])).await), ["pool/1"]);
    assert_eq!(device_ends(&daemon.allocate("b", &app(&[("gpu", 1)])).await), ["too-few-devices"]);
}

#[tokio::test]
async fn claims_have_names_of_their_own_whatever_the_pod_is_called() {
    let home = Home::new();
    let daemon = start(&home, &published("gpu", &[("0", &[]), ("1", &[]), ("2", &[])])).await;
    let long =
        ObjectRef::new("default", &format!("{}.{}", "x".repeat(39), "y".repeat(60)), "uid-long").unwrap();
    let two = ["one", "two"].map(|name| container(name, ContainerKind::App, &[("gpu", 1)]));
    let mut request = device_request("a", &two);
    request.pod = long;
    daemon.allocate_request(request).await;
    let claims = claims_of(&daemon.manager.allocation("uid-long").unwrap());
    assert_eq!(claims.len(), 2);
    assert!(claims[0].id.name != claims[1].id.name && claims[0].id.uid != claims[1].id.uid);
    for claim in &claims {
        assert!(claim.id.name.as_str().len() <= 63 && !claim.id.name.as_str().contains("--"), "{}", claim.id);
    }
}

#[tokio::test]
async fn devices_that_claims_hold_are_not_given() {
    let home = Home::new();
    let daemon = start(&home, &published("gpu", &[("0", &[]), ("1", &[])])).await;
    daemon.hold("pool/0", &stranger());
    assert_eq!(daemon.given("a", &[("gpu", 33)]).await, ["too-many-devices"]);
    assert_eq!(daemon.given("a", &[("gpu", 2)]).await, ["too-few-devices"]);
    assert_eq!(daemon.given("a", &[("gpu", 1)]).await, ["pool/1"]);
    let own = daemon.manager.allocation("uid-a").unwrap().entries[0].claim.clone().unwrap().id;
    daemon.free("a").await.unwrap();
    daemon.hold("pool/1", &own);
    assert_eq!(daemon.given("b", &[("gpu", 1)]).await, ["too-few-devices"]);
    assert_eq!(daemon.given("a", &[("gpu", 1)]).await, ["pool/1"], "its own claim does not count");
}

#[tokio::test]
async fn a_device_that_a_claim_took_meanwhile_is_chosen_again() {
    let home = Home::new();
    let daemon = start(&home, &published("gpu", &[("0", &[]), ("1", &[])])).await;
    let request = async |container: &str| {
        daemon.manager.reallocate(&uid("a"), container, &resource("gpu"), "test").await
    };
    assert_eq!(daemon.given("a", &[("gpu", 1)]).await, ["pool/0"]);
    daemon.hold("pool/0", &stranger());
    let devices = request("main").await.unwrap();
    assert_eq!(devices.into_keys().collect::<Vec<_>>(), ids(&["pool/1"]));
    assert_eq!(daemon.given("a", &[("gpu", 1)]).await, ["pool/1"]);
    assert_eq!(request("other").await.unwrap_err().code, "no-such-allocation");
    daemon.hold("pool/1", &stranger());
    assert_eq!(request("main").await.unwrap_err().code, "too-few-devices");
    assert!(daemon.manager.allocation("uid-a").is_none(), "what cannot be had is not kept");
    daemon.stop().await;
    assert!(home.start_at_once().manager.allocations().is_empty());
}

#[tokio::test]
async fn an_init_containers_claim_serves_a_container_that_wants_as_many() {
    use ContainerKind::{App, Init};
    let home = Home::new();
    let daemon = start(&home, &published("gpu", &[("0", &[]), ("1", &[]), ("2", &[])])).await;
    let wanted = [
        container("init", Init, &[("gpu", 2)]),
        container("main", App, &[("gpu", 2)]),
        container("more", App, &[("gpu", 1)]),
    ];
    let outcomes = daemon.allocate("a", &wanted).await;
    assert_eq!(device_ends(&outcomes), ["pool/0,pool/1", "pool/0,pool/1", "pool/2"]);
    let record = daemon.manager.allocation("uid-a").unwrap();
    assert_eq!(claims_of(&record).len(), 2, "two containers share one");
    daemon.hold("pool/0", &stranger());
    let problem = daemon.manager.reallocate(&uid("a"), "init", &resource("gpu"), "test").await.unwrap_err();
    assert_eq!(problem.code, "too-few-devices");
    let left: Vec<_> =
        daemon.manager.allocation("uid-a").unwrap().entries.iter().map(|e| e.container.clone()).collect();
    assert_eq!(left, ["more"], "both lose it");
}

#[tokio::test]
async fn pools_follow_their_driver() {
    let home = Home::new();
    let pools = published("gpu", &[("0", &[]), ("1", &[])]);
    let daemon = start(&home, &pools).await;
    pools.send_modify(|published| {
        let key = (PoolName::new("pool").unwrap(), DeviceName::new("0").unwrap());
        let health = DeviceHealth { state: HealthState::Unhealthy, ..DeviceHealth::default() };
        Arc::make_mut(published).health.insert(key, health);
    });
    daemon.until(|daemon| daemon.counts("gpu") == Some((2, 1))).await;
    assert_eq!(daemon.given("a", &[("gpu", 1)]).await, ["pool/1"]);
    assert_eq!(daemon.view("gpu").unwrap().devices[1].pods, [pod("a")]);

    daemon.manager.registry.retire(driver("gpu").as_str());
    daemon.until(|daemon| daemon.counts("gpu") == Some((2, 0))).await;
    daemon.serve_any(&driver("gpu"), DriverKind::Wasm, None, Some(pools.subscribe()), "");
    daemon.until(|daemon| daemon.counts("gpu") == Some((2, 1))).await;

    pools.send_modify(|published| Arc::make_mut(published).inventory.pools.clear());
    daemon.until(|daemon| daemon.counts("gpu") == Some((2, 0))).await;
    assert_eq!(daemon.view("gpu").unwrap().source, ResourceSource::Pools(driver("gpu")));
    pause();
    daemon.until(|daemon| daemon.counts("gpu").is_none()).await;
    assert_eq!(daemon.manager.capacity().removed, [resource("gpu")]);
}
