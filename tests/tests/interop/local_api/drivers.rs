//! A driver on the official helper library publishes its devices in the local API, and prepares a claim that the daemon allocated.

use serde_json::{Value, json};

use super::{Machine, NODE, claim, class, devices};
use crate::dra_driver::{Driver, NAME, program, until_serving};

const CDI: &str = "gpu.example.com/claim";

async fn start(machine: &Machine) -> Option<Driver> {
    let kubeconfig = machine.kubeconfig();
    let kubeconfig = kubeconfig.to_str().expect("the root has a name in UTF-8");
    let options = [
        "--node-name",
        NODE,
        "--kubeconfig",
        kubeconfig,
        "--devices",
        "2",
    ];
    let driver = Driver::start(machine, &program()?, &options).await;
    until_serving(machine, NAME).await;
    Some(driver)
}

fn uid(claim: &Value) -> &str {
    claim["metadata"]["uid"]
        .as_str()
        .expect("an object has a UID")
}

#[tokio::test]
async fn cluster_driver_serves_local_api_claims() {
    let Some(mut machine) = Machine::start().await else {
        return;
    };
    // The claims are first: they wait for devices.
    machine.apply("class", &class("gpu", NAME)).await.done();
    for name in ["one", "two", "three"] {
        machine
            .apply(name, &claim(name, "gpu", json!({})))
            .await
            .done();
    }
    let Some(mut driver) = start(&machine).await else {
        return;
    };
    machine.until_allocated("one").await;
    machine.until_allocated("two").await;
    let (one, two) = (
        machine.get("resourceclaim/one").await,
        machine.get("resourceclaim/two").await,
    );
    let mut both = [devices(&one), devices(&two)].concat();
    both.sort();
    assert_eq!(
        both,
        [
            format!("{NAME}/{NODE}/device-0"),
            format!("{NAME}/{NODE}/device-1")
        ]
    );
    assert!(devices(&machine.get("resourceclaim/three").await).is_empty());
    let slice = machine
        .kubectl(&["get", "resourceslices", "-o", "json"])
        .await
        .json()["items"][0]
        .take();
    assert_eq!(
        slice["metadata"]["ownerReferences"][0]["name"], NODE,
        "{slice:#}"
    );

    let answer = machine
        .cli(&["prepare", "--pod", "web", "--claim", "one"])
        .await
        .done();
    let device = devices(&one).remove(0);
    let device = device.rsplit('/').next().expect("a name").to_owned();
    let cdi = format!("{CDI}={}-{device}", uid(&one));
    assert!(answer.contains(&cdi), "{cdi} in {answer}");
    let call = json!([{ "namespace": "default", "name": "one", "uid": uid(&one), "cdi": [cdi] }]);
    assert_eq!(driver.claims_of("NodePrepareResources").await, call);

    // After both have died, the claim that is deleted is unprepared, and its device is for the one that waits.
    driver.kill().await;
    machine.crash().await;
    let Some(mut driver) = start(&machine).await else {
        return;
    };
    machine
        .kubectl(&["delete", "resourceclaim", "one", "--wait=false"])
        .await
        .done();
    machine.cli(&["unprepare", "default/web"]).await.done();
    let call = json!([{ "namespace": "default", "name": "one", "uid": uid(&one) }]);
    assert_eq!(driver.claims_of("NodeUnprepareResources").await, call);
    machine.until_deleted("resourceclaim/one").await;
    machine.until_allocated("three").await;
    assert_eq!(
        devices(&machine.get("resourceclaim/three").await),
        [format!("{NAME}/{NODE}/{device}")]
    );
}
