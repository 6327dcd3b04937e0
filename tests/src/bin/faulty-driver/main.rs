//! A native DRA driver that does everything right, or everything but one thing.
//!
//! The proof of the conformance cases: each fault is found by the case that is about it.

mod claims;
mod fault;
mod services;
mod slices;
mod state;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::Parser;
use nodedock_proto::kubelet::dra::v1::dra_plugin_server::DraPluginServer as V1Server;
use nodedock_proto::kubelet::dra::v1beta1::dra_plugin_server::DraPluginServer as V1beta1Server;
use nodedock_proto::kubelet::dra_health::v1::dra_resource_health_server::DraResourceHealthServer;
use nodedock_proto::kubelet::registration::registration_server::RegistrationServer;
use nodedock_proto::unix;
use tokio::net::UnixListener;
use tokio::signal::unix::{SignalKind, signal};
use tonic::transport::Server;

use fault::Fault;
use services::{Dra, Health, Registration};
use state::ClaimStore;

const DRIVER: &str = "faulty.example.com";

/// A DRA driver with devices that do nothing, and with a fault if one is named; with `list` alone it lists the faults
#[derive(Parser)]
struct Args {
    #[arg(long)]
    registry: PathBuf,
    #[arg(long)]
    plugins: PathBuf,
    #[arg(long)]
    cdi: PathBuf,
    #[arg(long)]
    state: PathBuf,
    #[arg(long)]
    kubeconfig: PathBuf,
    #[arg(long)]
    node: String,
    /// UID of a rolling update
    #[arg(long)]
    instance: Option<String>,
    #[arg(long, value_enum)]
    fault: Option<Fault>,
}

/// State shared by all parts of the driver.
struct Driver {
    name: String,
    node: String,
    cdi: PathBuf,
    state: ClaimStore,
    fault: Option<Fault>,
    client: kube::Client,
    claims: claims::Memory,
}

impl Driver {
    fn has(&self, fault: Fault) -> bool {
        self.fault == Some(fault)
    }
}

#[tokio::main]
async fn main() -> Result<()> {
    if std::env::args().nth(1).as_deref() == Some("list") {
        print!("{}", fault::list());
        return Ok(());
    }
    let args = Args::parse();
    let fault = args.fault;
    let has = |wanted| fault == Some(wanted);
    if has(Fault::NeverRegisters) {
        return ended().await;
    }
    let name = if has(Fault::NameWithUnderscore) {
        DRIVER.replace('.', "_")
    } else {
        DRIVER.to_owned()
    };
    let config = kube::config::Kubeconfig::read_from(&args.kubeconfig).context("the kubeconfig")?;
    let config = kube::Config::from_custom_kubeconfig(config, &Default::default()).await?;
    let client = kube::Client::try_from(config)?;
    let state = ClaimStore::load(&args.state, fault)?;
    let driver = Arc::new(Driver {
        name,
        node: args.node.clone(),
        cdi: args.cdi.clone(),
        state,
        fault,
        client,
        claims: claims::Memory::default(),
    });
    let part = args
        .instance
        .as_ref()
        .map(|instance| format!("-{instance}"))
        .unwrap_or_default();
    let endpoint = args.plugins.join(DRIVER).join(format!("dra{part}.sock"));
    let registration = args.registry.join(format!("{DRIVER}{part}-reg.sock"));
    std::fs::create_dir_all(args.plugins.join(DRIVER))?;
    if has(Fault::ListensLate) {
        tokio::spawn(register(
            driver.clone(),
            registration.clone(),
            endpoint.clone(),
        ));
        tokio::time::sleep(Duration::from_millis(3000)).await;
    }
    let listener = listen(&endpoint, has(Fault::KeepsStaleSockets))?;
    let mut server = Server::builder().add_service(V1Server::new(Dra(driver.clone())));
    server = server.add_service(DraResourceHealthServer::new(Health::new(driver.clone())));
    if !has(Fault::ListsWhatItDoesNotServe) {
        server = server.add_service(V1beta1Server::new(Dra(driver.clone())));
    }
    tokio::spawn(server.serve_with_incoming(unix::incoming(listener)));
    if !has(Fault::ListensLate) {
        register(driver.clone(), registration.clone(), endpoint.clone()).await?;
    }
    tokio::spawn(slices::publish(driver.clone()));
    if has(Fault::Polls) {
        tokio::spawn(slices::poll(driver.clone()));
    }
    ended().await?;
    if has(Fault::IgnoresSigterm) {
        ended().await?;
    }
    driver.state.end()?;
    for socket in [registration, endpoint] {
        std::fs::remove_file(socket)?;
    }
    Ok(())
}

async fn ended() -> Result<()> {
    signal(SignalKind::terminate())?.recv().await;
    Ok(())
}

fn listen(path: &Path, keeps: bool) -> Result<UnixListener> {
    if !keeps {
        let _ = std::fs::remove_file(path);
    }
    UnixListener::bind(path).with_context(|| format!("listen on {}", path.display()))
}

async fn register(driver: Arc<Driver>, socket: PathBuf, endpoint: PathBuf) -> Result<()> {
    let listener = listen(&socket, driver.has(Fault::KeepsStaleSockets))?;
    let service = RegistrationServer::new(Registration { driver, endpoint });
    tokio::spawn(
        Server::builder()
            .add_service(service)
            .serve_with_incoming(unix::incoming(listener)),
    );
    Ok(())
}
