//! Requests for claims, with fake drivers on a real checkpoint and a real CDI directory.

mod contention;
mod ended;
mod files;
mod full_disk;
mod hardware;
mod histories;
mod interrupted;
mod kubelet;
mod metadata;
mod parameters;
mod pure_drivers;
mod releases;
mod replaced;
mod retries;
mod swapped;
mod unreadable;
mod values;

use std::collections::BTreeMap;

use super::fixtures::{claim, driver, pod, transient, uid};
use super::{ClaimEnd, PodSelector};
use crate::driver::PreparedClaims;
use nodedock_model::{ClaimState, ContainerClaim, Device, DeviceName, Pool, PoolName};

use crate::manager::tests::scene::{
    FakeDriver, Home, Reply, cdi_devices, ends, request, with_claim, with_gpu, with_prepared,
    with_two_drivers,
};

const PREPARED: Option<ClaimState> = Some(ClaimState::Prepared);

#[tokio::test]
async fn repeated_prepare_calls_no_driver() {
    let (home, daemon, a, gpu) = with_gpu();
    daemon.source.put(claim("one", &["gpu/0", "gpu/1"], &[&a]));
    let first = daemon.prepare(&a, &["one"]).await;
    assert_eq!(ends(&first), ["prepared"]);
    assert_eq!(
        cdi_devices(&first),
        [
            "gpu.example.com/claim=uid-one-0",
            "gpu.example.com/claim=uid-one-1"
        ]
    );
    let commits = daemon.commits();
    assert_eq!(daemon.prepare(&a, &["one"]).await, first);
    assert_eq!(
        (gpu.counts(), daemon.commits(), daemon.cdi_files().len()),
        ((1, 0), commits, 1)
    );

    daemon.stop().await;
    let daemon = home.start();
    assert_eq!(
        daemon.manager.pods.get("uid-a").unwrap().containers,
        first.containers,
        "from the checkpoint"
    );
    assert_eq!(daemon.unprepare(&a).await.len(), 1);
}

#[tokio::test]
async fn containers_get_devices_of_named_requests() {
    let (_home, daemon, a, _gpu) = with_gpu();
    daemon
        .source
        .put(claim("one", &["gpu/0", "gpu/1", "gpu/2"], &[&a]));
    let mut two = request(&a, &["one"]);
    let of = |name: &str| ContainerClaim {
        pod_claim_name: "one".to_owned(),
        request: Some(name.to_owned()),
    };
    two.containers[0].claims = vec![of("0"), of("2"), of("none")];
    let outcome = daemon.prepare_request(two, vec![]).await;
    assert_eq!(
        cdi_devices(&outcome),
        [
            "gpu.example.com/claim=uid-one-0",
            "gpu.example.com/claim=uid-one-2"
        ]
    );
}

#[tokio::test]
async fn unused_claim_is_prepared() {
    let (_home, daemon, a, gpu) = with_claim();
    let mut unused = request(&a, &["one"]);
    unused.containers[0].claims.clear();
    let outcome = daemon.prepare_request(unused, vec![]).await;
    assert_eq!(
        (ends(&outcome), cdi_devices(&outcome).len()),
        (vec!["prepared"], 0)
    );
    assert_eq!((daemon.state("uid-one"), gpu.counts()), (PREPARED, (1, 0)));
    assert_eq!(daemon.unprepare(&a).await, [Ok(ClaimEnd::Unprepared)]);
}

#[tokio::test]
async fn unprepare_removes_file_and_record() {
    let (home, daemon, a, gpu) = with_prepared().await;
    assert!(daemon.manager.pods.might_need_unprepare("uid-a"));
    assert_eq!(daemon.unprepare(&a).await, [Ok(ClaimEnd::Unprepared)]);
    assert_eq!(gpu.calls().unprepare[0][0].memo, b"call 1");
    assert!(daemon.cdi_files().is_empty() && daemon.is_empty());
    assert!(!daemon.manager.pods.might_need_unprepare("uid-a"));
    assert_eq!(daemon.unprepare(&a).await, [], "what is unknown is done");
    assert_eq!(gpu.counts(), (1, 1));

    daemon.stop().await;
    assert!(home.start().is_empty());
}

#[tokio::test]
async fn pods_claims_share_one_driver_call() {
    let (_home, daemon, a, gpu, nic) = with_two_drivers();
    for (name, devices) in [
        ("one", ["gpu/0", "nic/0"]),
        ("two", ["gpu/1", "gpu/2"]),
        ("three", ["gpu/3", "nic/1"]),
    ] {
        daemon.source.put(claim(name, &devices, &[&a]));
    }
    let before = daemon.commits();
    assert_eq!(
        ends(&daemon.prepare(&a, &["one", "two", "three"]).await),
        ["prepared"; 3]
    );
    assert_eq!(daemon.commits() - before, 2, "the intents, and the results");
    assert_eq!(
        gpu.calls().prepare,
        [[uid("uid-one"), uid("uid-three"), uid("uid-two")]]
    );
    assert_eq!(nic.calls().prepare, [[uid("uid-one"), uid("uid-three")]]);
    daemon.unprepare(&a).await;
    assert_eq!(
        (
            gpu.calls().unprepare[0].len(),
            nic.calls().unprepare[0].len()
        ),
        (3, 2)
    );
}

/// Claims that came with one that makes no CDI file were refused with it, and the bad one stayed `prepared` for good.
#[tokio::test]
async fn unrenderable_claim_is_refused_alone() {
    let (_home, daemon, a, gpu) = with_gpu();
    gpu.reply("uid-bad", Reply::Unrenderable);
    daemon.source.put(claim("bad", &["gpu/0"], &[&a]));
    daemon.source.put(claim("good", &["gpu/1"], &[&a]));
    assert_eq!(
        ends(&daemon.prepare(&a, &["bad", "good"]).await),
        ["cdi-not-valid", "prepared"]
    );
    assert_eq!(daemon.state("uid-bad"), Some(ClaimState::Preparing));
    assert_eq!(
        ends(&daemon.prepare(&a, &["bad", "good"]).await),
        ["prepared", "prepared"],
        "it is called again"
    );
}

#[tokio::test]
async fn unknown_driver_or_device_is_refused() {
    let (home, a) = (Home::new(), pod("a"));
    let devices = BTreeMap::from([(DeviceName::new("0").unwrap(), Device::default())]);
    let gpu = FakeDriver::with_pool(
        driver("gpu"),
        Pool {
            devices,
            ..Pool::default()
        },
    );
    let daemon = home.start();
    daemon.serve(&gpu);
    daemon.source.put(claim("absent", &["nic/0"], &[&a]));
    daemon
        .source
        .put(claim("beyond", &["gpu/0", "gpu/1"], &[&a]));
    let mut elsewhere = claim("elsewhere", &["gpu/0"], &[&a]);
    elsewhere.allocation.as_mut().unwrap().devices[0].pool = PoolName::new("other").unwrap();
    daemon.source.put(elsewhere);
    let before = daemon.commits();
    let outcome = daemon
        .prepare(&a, &["absent", "beyond", "elsewhere", "none"])
        .await;
    assert_eq!(
        ends(&outcome),
        [
            "driver-unknown",
            "no-such-device",
            "no-such-pool",
            "no-such-claim"
        ]
    );
    assert_eq!(daemon.commits(), before);
    assert!(daemon.manager.pods.list().is_empty());
}

#[tokio::test]
async fn claimed_device_cannot_be_held_exclusively() {
    let (home, a) = (Home::new(), pod("a"));
    let hardware = vec!["pci:0000:3b:00.0".to_owned()];
    let device = Device {
        identity: hardware.clone(),
        ..Device::default()
    };
    let devices = BTreeMap::from([(DeviceName::new("0").unwrap(), device)]);
    let gpu = FakeDriver::with_pool(
        driver("gpu"),
        Pool {
            devices,
            ..Pool::default()
        },
    );
    let daemon = home.start();
    daemon.serve(&gpu);
    daemon.source.put(claim("one", &["gpu/0"], &[&a]));
    daemon.source.put(claim("monitor", &["!gpu/0"], &[&a]));
    assert_eq!(
        ends(&daemon.prepare(&a, &["one", "monitor"]).await),
        ["prepared"; 2]
    );
    let holders = |short: &str, device: &str, identity: &[String]| {
        let facts = super::machine::DeviceFacts {
            identity: identity.to_vec(),
            ..super::machine::DeviceFacts::default()
        };
        let holds = facts.exclusive_holds(&driver(short), "pool", device);
        let holders = daemon.manager.records.table().holders(&holds);
        holders
            .into_iter()
            .map(|claim| claim.name.to_string())
            .collect::<Vec<_>>()
    };
    assert_eq!(
        holders("gpu", "0", &[]),
        ["one"],
        "one with admin access keeps it from no claim"
    );
    assert_eq!(holders("gpu", "0", &hardware), ["one"]);
    assert_eq!(
        holders("nic", "7", &hardware),
        ["one"],
        "the same hardware by another name"
    );
    assert!(holders("nic", "0", &[]).is_empty() && holders("gpu", "1", &[]).is_empty());
}

#[tokio::test]
async fn wrong_uid_or_owner_is_refused() {
    let (_home, daemon, a, gpu) = with_gpu();
    let mut made = claim("made", &["gpu/0"], &[&a]);
    made.owner_pod = Some(uid("uid-b"));
    daemon.source.put(made);
    daemon.source.put(claim("one", &["gpu/1"], &[&a]));
    let mut asked = request(&a, &["made", "one"]);
    asked.claims[1].claim_uid = Some(uid("uid-older"));
    let outcome = daemon.prepare_request(asked, vec![]).await;
    assert_eq!(ends(&outcome), ["claim-of-another-pod", "claim-replaced"]);
    assert_eq!(gpu.counts(), (0, 0));
}

#[tokio::test]
async fn inline_claim_overrides_the_source() {
    let (_home, daemon, a, _gpu) = with_gpu();
    daemon
        .source
        .put(claim("one@uid-source", &["gpu/0"], &[&a]));
    let inline = vec![claim("one@uid-inline", &["gpu/1"], &[&a])];
    let outcome = daemon.prepare_request(request(&a, &["one"]), inline).await;
    assert_eq!(
        cdi_devices(&outcome),
        ["gpu.example.com/claim=uid-inline-1"]
    );
}

#[tokio::test]
async fn changed_allocation_is_refused() {
    let (_home, daemon, a, _gpu) = with_claim();
    let first = daemon.prepare(&a, &["one"]).await;
    daemon.source.put(claim("one", &["gpu/1"], &[&a]));
    assert_eq!(
        ends(&daemon.prepare(&a, &["one"]).await),
        ["allocation-changed"]
    );
    assert_eq!(
        daemon.manager.pods.get("uid-a").unwrap().containers,
        first.containers
    );
}

#[tokio::test]
async fn pods_are_unprepared_by_name() {
    let (_home, daemon, a, _gpu) = with_prepared().await;
    let of =
        |name: &nodedock_model::ObjectName| PodSelector::Name(a.namespace.clone(), name.clone());
    assert_eq!(
        daemon
            .manager
            .pods
            .unprepare(of(&pod("b").name), "test".into())
            .await,
        Ok(vec![])
    );
    let outcomes = daemon
        .manager
        .pods
        .unprepare(of(&a.name), "test".into())
        .await
        .unwrap();
    assert_eq!((outcomes.len(), &outcomes[0].pod), (1, &a));
    assert!(daemon.manager.records.claims().is_empty());
}

#[tokio::test]
async fn driver_sees_only_its_claims() {
    let (_home, daemon, a, _gpu, nic) = with_two_drivers();
    nic.reply("uid-both", Reply::Refuse(transient()));
    daemon.prepare(&a, &["both"]).await;
    let prepared = &daemon.claims;
    assert_eq!(
        prepared.after(&driver("gpu"), None, None, 9)[0]
            .claim
            .devices
            .len(),
        1
    );
    assert_eq!(
        prepared.get(&driver("gpu"), "uid-both").unwrap().memo,
        b"call 1"
    );
    let asked = prepared.after(&driver("nic"), None, None, 9);
    assert_eq!(
        (asked.len(), asked[0].prepared, asked[0].memo.len()),
        (1, false, 0)
    );
    assert!(
        prepared
            .after(&driver("gpu"), None, Some("uid-both"), 9)
            .is_empty(),
        "it is the last"
    );
    assert!(prepared.after(&driver("gpu"), None, None, 0).is_empty());
    assert_eq!(
        daemon
            .manager
            .records
            .users_of_device(&driver("nic"), "pool", "0")
            .len(),
        1
    );
}
