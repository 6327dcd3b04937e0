//! Tests with many sockets, and with one that is created again during its registration.

use native_null::{DeviceHealth, HealthState as Said};
use tokio::io::AsyncReadExt;
use tokio::net::UnixListener;

use super::*;
use nodedock_model::HealthState;

#[tokio::test]
async fn ten_instances_replace_each_other() {
    let mut dock = Dock::new();
    let mut instances = Vec::new();
    for n in 0..10 {
        let plugin = dock
            .start(dock.options(DRIVER).instance(&n.to_string()))
            .await;
        dock.state(&plugin.registration_socket(), DriverState::Serving)
            .await;
        instances.push(plugin);
    }
    while let Some(newest) = instances.pop() {
        assert_eq!(dock.registry.list().len(), instances.len() + 1);
        assert_eq!(
            dock.served_by(DRIVER).unwrap(),
            newest.registration_socket().display().to_string()
        );
        newest.unregister().unwrap();
        dock.gone(&newest.registration_socket()).await;
    }
    assert!(dock.registry.list().is_empty() && dock.registry.instances.all().is_empty());
}

#[tokio::test]
async fn reused_socket_takes_the_last_name() {
    let mut dock = Dock::new();
    let mut before = None;
    for n in 0..10 {
        let driver = format!("null-{n}.example.com");
        let mut options = dock.options(&driver);
        options.registration_name = "same.sock".into();
        let plugin = dock.start(options).await;
        dock.until("the new name serves", |dock| {
            dock.served_by(&driver).is_ok()
        })
        .await;
        assert_eq!(
            (
                dock.registry.list().len(),
                dock.registry.instances.all().len()
            ),
            (1, 1),
            "{n}"
        );
        // The previous process ends only now.
        drop(before.replace(plugin));
    }
}

/// Replaces a socket by a listener that does not respond.
fn mute(path: &Path) -> UnixListener {
    let _ = std::fs::remove_file(path);
    UnixListener::bind(path).unwrap()
}

#[tokio::test]
async fn socket_has_one_worker() {
    let mut dock = Dock::with(PATIENCE, SHORT);
    let path = dock.bench.dir.path().join("reg/mute.sock");
    let first = mute(&path);
    let (mut asked, _) = first.accept().await.unwrap();
    let second = mute(&path);
    let mut said = Vec::new();
    tokio::select! {
        biased;
        ended = asked.read_to_end(&mut said) => drop(ended),
        _ = second.accept() => panic!("a second registration of the socket began beside the first"),
    }
    assert!(
        said.starts_with(b"PRI * HTTP/2.0"),
        "it was being asked: {said:?}"
    );
    let (_asked, _) = second.accept().await.unwrap();
    std::fs::remove_file(&path).unwrap();
    dock.gone(&path).await;
}

#[tokio::test]
async fn health_ends_with_its_own_plugin() {
    let mut dock = Dock::new();
    let start = async |dock: &mut Dock, driver: &str| {
        let mut options = dock.options(driver);
        options.versions.health_v1 = true;
        let plugin = dock.start(options).await;
        dock.state(&plugin.registration_socket(), DriverState::Serving)
            .await;
        plugin
    };
    let (one, two) = (
        start(&mut dock, "one.example.com").await,
        start(&mut dock, "two.example.com").await,
    );
    let states = |dock: &Dock, plugin: &Plugin| -> Vec<HealthState> {
        let health = dock
            .view(&plugin.registration_socket())
            .unwrap()
            .native
            .unwrap()
            .health;
        health.into_values().map(|device| device.state).collect()
    };
    for plugin in [&one, &two] {
        let (pool, device, message) = ("p".to_owned(), "d".to_owned(), String::new());
        let said = DeviceHealth {
            pool,
            device,
            state: Said::Unhealthy,
            timeout_seconds: 600,
            message,
        };
        plugin.report_health(vec![said]);
        while states(&dock, plugin) != [HealthState::Unhealthy] {
            tokio::task::yield_now().await;
        }
    }
    one.unregister().unwrap();
    dock.gone(&one.registration_socket()).await;
    drop(one);
    let again = start(&mut dock, "one.example.com").await;
    assert_eq!(
        (states(&dock, &again), states(&dock, &two)),
        (vec![], vec![HealthState::Unhealthy])
    );
}
