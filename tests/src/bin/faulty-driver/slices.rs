//! The driver's slices: published, and brought back.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Result;
use futures::StreamExt;
use kube::api::{
    Api, ApiResource, DeleteParams, DynamicObject, GroupVersionKind, ListParams, PostParams,
};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, Event, watcher};
use serde_json::{Value, json};

use crate::Driver;
use crate::claims::boot;
use crate::fault::Fault;

const DEVICES: usize = 4;

/// The devices by name.
pub(crate) fn names(driver: &Driver) -> Vec<String> {
    let part = match driver.has(Fault::OtherNamesAtEachStart) {
        true => format!("{}-", std::process::id()),
        false => String::new(),
    };
    (0..DEVICES)
        .map(|index| format!("dev-{part}{index}"))
        .collect()
}

fn api(driver: &Driver) -> Api<DynamicObject> {
    let kind = GroupVersionKind::gvk("resource.k8s.io", "v1", "ResourceSlice");
    Api::all_with(
        driver.client.clone(),
        &ApiResource::from_gvk_with_plural(&kind, "resourceslices"),
    )
}

/// Name and spec of each slice, without the generation.
fn desired(driver: &Driver) -> Vec<(String, Value)> {
    let counter = if driver.has(Fault::UnknownCounter) {
        "other"
    } else {
        "memory"
    };
    let mut devices: Vec<Value> = names(driver)
        .into_iter()
        .map(|name| json!({ "name": name }))
        .collect();
    let part = |index: usize| {
        let counters = json!({ counter: { "value": "1Gi" } });
        json!({ "name": format!("part-{index}"), "consumesCounters": [{ "counterSet": "card", "counters": counters }] })
    };
    devices.extend((0..2).map(part));
    let taints = json!([{ "key": "example.com/broken", "effect": "NoSchedule" }]);
    devices.push(json!({ "name": "broken", "taints": taints }));
    let counters = json!([{ "name": "card", "counters": { "memory": { "value": "2Gi" } } }]);
    let mut contents = vec![
        ("devices", json!({ "devices": devices })),
        ("counters", json!({ "sharedCounters": counters })),
    ];
    if driver.has(Fault::OneDeviceInTwoSlices) {
        contents.push((
            "again",
            json!({ "devices": [{ "name": names(driver)[0] }] }),
        ));
    }
    let count = match driver.has(Fault::AllSlicesInvalid) {
        true => 0,
        false => contents.len() + usize::from(driver.has(Fault::CountsASliceTooMany)),
    };
    let name = if driver.has(Fault::SlicesOfAnotherDriver) {
        "other.example.com"
    } else {
        &driver.name
    };
    let pool = pool(driver);
    let spec = |(part, mut spec): (&str, Value)| {
        spec["driver"] = name.into();
        spec["pool"] = json!({ "name": pool, "resourceSliceCount": count });
        match driver.has(Fault::SlicesForAllNodes) {
            true => spec["allNodes"] = true.into(),
            false => spec["nodeName"] = driver.node.as_str().into(),
        }
        // The name of a slice's pool cannot be changed.
        (format!("faulty-{pool}-{part}"), spec)
    };
    contents.into_iter().map(spec).collect()
}

/// The name of the pool.
pub(crate) fn pool(driver: &Driver) -> String {
    match driver.has(Fault::PoolOfTheBoot) {
        true => format!("{}-{}", driver.node, boot().get(..8).unwrap_or_default()),
        false => driver.node.clone(),
    }
}

/// Returns whether a published spec is as desired, apart from its generation.
fn is_same(published: &Value, desired: &Value) -> bool {
    let mut published = published.clone();
    published["pool"]
        .as_object_mut()
        .map(|pool| pool.remove("generation"));
    for device in published
        .get_mut("devices")
        .and_then(Value::as_array_mut)
        .into_iter()
        .flatten()
    {
        // The server says when it was added.
        for taint in device
            .get_mut("taints")
            .and_then(Value::as_array_mut)
            .into_iter()
            .flatten()
        {
            taint.as_object_mut().map(|taint| taint.remove("timeAdded"));
        }
    }
    published == *desired
}

/// Makes the slices as desired. A pool that changes gets the next generation, in all its slices.
async fn reconcile(driver: &Driver, always: bool) -> Result<()> {
    let api = api(driver);
    let found: Vec<DynamicObject> = api.list(&ListParams::default()).await?.items;
    let ours = |name: &str| {
        found
            .iter()
            .find(|slice| slice.metadata.name.as_deref() == Some(name))
    };
    let generation = |slice: &DynamicObject| {
        slice.data["spec"]["pool"]["generation"]
            .as_i64()
            .unwrap_or_default()
    };
    let desired = desired(driver);
    let newest = desired
        .iter()
        .filter_map(|(name, _)| ours(name))
        .map(generation)
        .max();
    let all_same = desired
        .iter()
        .all(|(name, spec)| ours(name).is_some_and(|slice| is_same(&slice.data["spec"], spec)));
    if all_same && !always {
        return Ok(());
    }
    let falls = driver.has(Fault::GenerationFalls) && newest.is_some();
    let next = if falls {
        1
    } else {
        newest.unwrap_or_default() + 1
    };
    let times = if driver.has(Fault::RepairsManyTimes) && newest.is_some() {
        3
    } else {
        1
    };
    for time in 0..times {
        for (name, spec) in &desired {
            let mut spec = spec.clone();
            spec["pool"]["generation"] = (next + time).into();
            write(driver, &api, name, &spec).await?;
        }
    }
    Ok(())
}

async fn write(driver: &Driver, api: &Api<DynamicObject>, name: &str, spec: &Value) -> Result<()> {
    let known = api.get_opt(name).await?;
    let node: Api<k8s_openapi::api::core::v1::Node> = Api::all(driver.client.clone());
    let uid = node
        .get(&driver.node)
        .await?
        .metadata
        .uid
        .unwrap_or_default();
    let owner = json!([{ "apiVersion": "v1", "kind": "Node", "name": driver.node, "uid": uid }]);
    let mut object = json!({
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": { "name": name },
        "spec": spec,
    });
    if !driver.has(Fault::SlicesWithoutOwner) {
        object["metadata"]["ownerReferences"] = owner;
    }
    match known {
        Some(known) => {
            object["metadata"]["resourceVersion"] = known.metadata.resource_version.into();
            api.replace(
                name,
                &PostParams::default(),
                &serde_json::from_value(object)?,
            )
            .await?;
        }
        None => {
            api.create(&PostParams::default(), &serde_json::from_value(object)?)
                .await?;
        }
    }
    Ok(())
}

/// Publishes the slices, and brings back what others change.
pub(crate) async fn publish(driver: Arc<Driver>) {
    if let Err(error) = publish_with(&driver).await {
        eprintln!("slices: {error:#}");
    }
}

async fn publish_with(driver: &Driver) -> Result<()> {
    let of = api(driver);
    if driver.has(Fault::DeletesItsSlicesAtStart) {
        for (name, mut spec) in desired(driver) {
            let Some(known) = of.get_opt(&name).await? else {
                continue;
            };
            spec["pool"]["generation"] = known.data["spec"]["pool"]["generation"].clone();
            of.delete(&name, &DeleteParams::default()).await?;
            write(driver, &of, &name, &spec).await?;
        }
    }
    let is_new = of.get_opt(&desired(driver)[0].0).await?.is_none();
    if driver.has(Fault::WritesAnInvalidSlice) && is_new {
        let _ = write(
            driver,
            &of,
            "faulty-invalid",
            &json!({ "driver": driver.name, "devices": [{ "name": "NO" }] }),
        )
        .await;
    }
    reconcile(driver, driver.has(Fault::WritesItsSlicesAtStart)).await?;
    let mut events = watcher(of, watcher::Config::default())
        .default_backoff()
        .boxed();
    let mut is_listed = false;
    while let Some(event) = events.next().await {
        let is_ignored = match event {
            Ok(Event::InitDone) => {
                is_listed = true;
                true
            }
            Ok(Event::Delete(_)) => driver.has(Fault::IgnoresDeletedSlices),
            Ok(Event::Apply(_)) => driver.has(Fault::IgnoresChangedSlices),
            _ => true,
        };
        if is_listed && !is_ignored {
            // Changes come together.
            tokio::time::sleep(Duration::from_millis(100)).await;
            if let Err(error) = reconcile(driver, false).await {
                eprintln!("slices: {error:#}");
            }
        }
    }
    Ok(())
}

/// Lists slices again and again.
pub(crate) async fn poll(driver: Arc<Driver>) {
    loop {
        let _ = api(&driver).list(&ListParams::default()).await;
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
