//! Pools of drivers under a resource's name, and claims that take from them as well.

use std::collections::BTreeMap;
use std::sync::Arc;

use tokio::sync::watch;
use tokio::time::pause;

use crate::driver::Published;
use crate::manager::claims::fixtures as claims;
use crate::manager::devices::ResourceSource;
use crate::manager::devices::fixtures::{driver, ids, pod, resource};
use crate::manager::devices::held;
use crate::manager::tests::scene::{
    Daemon, FakeDriver, Home, app, container, device_ends, device_request,
};
use nodedock_model::{
    ClaimRecord, ContainerKind, Device, DeviceHealth, DeviceName, DriverKind, HealthState,
    Inventory, ObjectRef, Pool, PoolName,
};

/// A driver's pool `pool` with devices of NUMA nodes, under the name `example.com/SHORT`.
pub(super) fn published(short: &str, devices: &[(&str, &[u32])]) -> watch::Sender<Arc<Published>> {
    let device = |(name, nodes): &(&str, &[u32])| {
        (
            DeviceName::new(name).unwrap(),
            Device {
                numa_nodes: nodes.to_vec(),
                ..Device::default()
            },
        )
    };
    let pool = Pool {
        devices: devices.iter().map(device).collect(),
        extended_resource: Some(resource(short)),
        ..Pool::default()
    };
    let pools = BTreeMap::from([(PoolName::new("pool").unwrap(), pool)]);
    watch::Sender::new(Arc::new(Published {
        inventory: Inventory { pools },
        ..Published::default()
    }))
}

/// Serves `gpu.example.com` with pools.
fn serve(daemon: &Daemon, pools: &watch::Sender<Arc<Published>>) {
    let claims = FakeDriver::new(driver("gpu"));
    daemon.serve_any(
        &driver("gpu"),
        DriverKind::Wasm,
        Some(claims),
        Some(pools.subscribe()),
        "",
    );
}

/// A daemon with the pool of `gpu.example.com`.
async fn start(home: &Home, pools: &watch::Sender<Arc<Published>>) -> Daemon {
    let daemon = home.start_at_once();
    daemon.starts.devices();
    serve(&daemon, pools);
    daemon
        .until(|daemon| daemon.view("gpu").is_some_and(|view| view.active))
        .await;
    daemon
}

/// The claims of a pod.
fn claims_of(daemon: &Daemon, pod: &str) -> Vec<Arc<ClaimRecord>> {
    let claims = daemon.manager.records.claims().into_iter();
    claims
        .filter(|claim| claim.pods.contains_key(pod))
        .collect()
}

fn stranger() -> ObjectRef {
    ObjectRef::new("default", "other-claim", "uid-claim").unwrap()
}

#[tokio::test]
async fn pool_claim_uses_fewest_numa_nodes() {
    let home = Home::new();
    let pools = published(
        "gpu",
        &[
            ("a0", &[0]),
            ("a1", &[1]),
            ("b0", &[0]),
            ("b1", &[1]),
            ("c1", &[1]),
        ],
    );
    let daemon = start(&home, &pools).await;
    let outcomes = daemon.allocate("a", &app(&[("gpu", 2)])).await;
    assert_eq!(device_ends(&outcomes), ["pool/a0,pool/b0"]);
    let [claim] = &claims_of(&daemon, "uid-a")[..] else {
        panic!("one claim")
    };
    let given: Vec<_> = claim
        .allocation
        .devices
        .iter()
        .map(|d| format!("{}/{}/{} for {}", d.driver, d.pool, d.device, d.request))
        .collect();
    assert_eq!(
        given,
        [
            "gpu.example.com/pool/a0 for extended-resource",
            "gpu.example.com/pool/b0 for extended-resource"
        ]
    );
    assert!(
        claim.id.name.as_str().starts_with("a-") && claim.id.namespace == pod("a").namespace,
        "{}",
        claim.id
    );

    let again = daemon.allocate("a", &app(&[("gpu", 2)])).await;
    assert_eq!(again, outcomes);
    daemon.free("a").await.unwrap();
    assert_eq!(daemon.allocate("a", &app(&[("gpu", 2)])).await, outcomes);
    let [second] = &claims_of(&daemon, "uid-a")[..] else {
        panic!("one claim")
    };
    assert_eq!(
        second.id, claim.id,
        "the same claim whenever it is asked for"
    );
}

#[tokio::test]
async fn allocated_devices_are_not_chosen() {
    let home = Home::new();
    let daemon = start(&home, &published("gpu", &[("0", &[]), ("1", &[])])).await;
    daemon
        .source
        .allocate(claims::claim("one", &["gpu/0"], &[]));
    assert_eq!(
        device_ends(&daemon.allocate("a", &app(&[("gpu", 1)])).await),
        ["pool/1"]
    );
    assert_eq!(
        device_ends(&daemon.allocate("b", &app(&[("gpu", 1)])).await),
        ["too-few-devices"]
    );
}

#[tokio::test]
async fn pool_claims_have_unique_names() {
    let home = Home::new();
    let daemon = start(
        &home,
        &published("gpu", &[("0", &[]), ("1", &[]), ("2", &[])]),
    )
    .await;
    let long = ObjectRef::new(
        "default",
        &format!("{}.{}", "x".repeat(39), "y".repeat(60)),
        "uid-long",
    )
    .unwrap();
    let two = ["one", "two"].map(|name| container(name, ContainerKind::App, &[("gpu", 1)]));
    let mut request = device_request("a", &two);
    request.pod = long;
    daemon.allocate_request(request).await;
    let claims = claims_of(&daemon, "uid-long");
    assert_eq!(claims.len(), 2);
    assert!(claims[0].id.name != claims[1].id.name && claims[0].id.uid != claims[1].id.uid);
    for claim in &claims {
        assert!(
            claim.id.name.as_str().len() <= 63 && !claim.id.name.as_str().contains("--"),
            "{}",
            claim.id
        );
    }
}

#[tokio::test]
async fn held_devices_are_not_chosen() {
    let home = Home::new();
    let daemon = start(&home, &published("gpu", &[("0", &[]), ("1", &[])])).await;
    daemon.hold("pool/0", &stranger());
    assert_eq!(
        daemon.given("a", &[("gpu", 33)]).await,
        ["too-many-devices"]
    );
    assert_eq!(daemon.given("a", &[("gpu", 2)]).await, ["too-few-devices"]);
    assert_eq!(daemon.given("a", &[("gpu", 1)]).await, ["pool/1"]);
    assert_eq!(daemon.given("b", &[("gpu", 1)]).await, ["too-few-devices"]);
    assert_eq!(
        daemon.given("a", &[("gpu", 1)]).await,
        ["pool/1"],
        "its own claim does not count"
    );
}

#[tokio::test]
async fn claimed_device_is_replaced_by_another() {
    let home = Home::new();
    let daemon = start(&home, &published("gpu", &[("0", &[]), ("1", &[])])).await;
    assert_eq!(daemon.given("a", &[("gpu", 1)]).await, ["pool/0"]);
    let had = held::entries(&daemon.manager.records.table(), "uid-a").remove(0);
    let again = async || daemon.manager.choices.choose_others(&pod("a"), &had).await;
    daemon.hold("pool/0", &stranger());
    assert_eq!(
        again()
            .await
            .unwrap()
            .devices
            .into_keys()
            .collect::<Vec<_>>(),
        ids(&["pool/1"])
    );
    assert_eq!(
        daemon.given("b", &[("gpu", 1)]).await,
        ["too-few-devices"],
        "it is reserved"
    );
    daemon.hold("pool/1", &stranger());
    assert_eq!(again().await.unwrap_err().code, "too-few-devices");
    daemon.registry.retire(driver("gpu").as_str());
    daemon
        .until(|daemon| daemon.counts("gpu") == Some((2, 0)))
        .await;
    assert_eq!(again().await.unwrap_err().code, "no-healthy-device");
}

#[tokio::test]
async fn init_containers_claim_is_reused() {
    use ContainerKind::{App, Init};
    let home = Home::new();
    let daemon = start(
        &home,
        &published("gpu", &[("0", &[]), ("1", &[]), ("2", &[])]),
    )
    .await;
    let wanted = [
        container("init", Init, &[("gpu", 2)]),
        container("main", App, &[("gpu", 2)]),
        container("more", App, &[("gpu", 1)]),
    ];
    let outcomes = daemon.allocate("a", &wanted).await;
    assert_eq!(
        device_ends(&outcomes),
        ["pool/0,pool/1", "pool/0,pool/1", "pool/2"]
    );
    assert_eq!(
        claims_of(&daemon, "uid-a").len(),
        2,
        "two containers share one"
    );
}

#[tokio::test]
async fn pools_follow_their_driver() {
    let home = Home::new();
    let pools = published("gpu", &[("0", &[]), ("1", &[])]);
    let daemon = start(&home, &pools).await;
    pools.send_modify(|published| {
        let key = (
            PoolName::new("pool").unwrap(),
            DeviceName::new("0").unwrap(),
        );
        let health = DeviceHealth {
            state: HealthState::Unhealthy,
            ..DeviceHealth::default()
        };
        Arc::make_mut(published).health.insert(key, health);
    });
    daemon
        .until(|daemon| daemon.counts("gpu") == Some((2, 1)))
        .await;
    assert_eq!(daemon.given("a", &[("gpu", 1)]).await, ["pool/1"]);
    assert_eq!(daemon.view("gpu").unwrap().devices[1].pods, [pod("a")]);

    daemon.registry.retire(driver("gpu").as_str());
    daemon
        .until(|daemon| daemon.counts("gpu") == Some((2, 0)))
        .await;
    serve(&daemon, &pools);
    daemon
        .until(|daemon| daemon.counts("gpu") == Some((2, 1)))
        .await;

    pools.send_modify(|published| Arc::make_mut(published).inventory.pools.clear());
    daemon
        .until(|daemon| daemon.counts("gpu") == Some((2, 0)))
        .await;
    assert_eq!(
        daemon.view("gpu").unwrap().source,
        ResourceSource::Pools(driver("gpu"))
    );
    pause();
    daemon.until(|daemon| daemon.counts("gpu").is_none()).await;
    assert_eq!(daemon.manager.devices.capacity().removed, [resource("gpu")]);
}
