//! A WASM driver alone, without daemon and disk: the call, and the load of a file, cold and from the cache.

use std::sync::Arc;
use std::time::{Duration, Instant};

use nodedock_core::driver::values::NoJournal;
use nodedock_core::driver::{Call, ClaimDriver};
use nodedock_core::records::SharedClaimTable;
use nodedock_model::grant::Grant;
use nodedock_model::{AllocatedDevice, DeviceName, DriverClaim, DriverName, ObjectRef, PoolName};
use nodedock_tests::drivers::{Form, MOCK_GPU, MOCK_GPU_NAME, side_file, wasm};
use nodedock_tests::golden::settings;
use nodedock_wasm::{CachePaths, DriverFile, Trigger, WasmHost};

use crate::Size;
use crate::table::{Table, Times};

pub(crate) async fn run(size: Size, table: &mut Table) {
    calls(size, table).await;
    for form in [Form::Core, Form::Component] {
        loads(size, form, table).await;
    }
}

fn host(cache: Option<CachePaths>) -> Arc<WasmHost> {
    WasmHost::new(
        settings(cache),
        Arc::new(SharedClaimTable::default()),
        Arc::new(NoJournal),
    )
    .expect("set up the sandbox")
}

fn grant() -> Grant {
    Grant::parse(&side_file(MOCK_GPU, "grant")).expect("the example's grant")
}

fn call() -> Call {
    Call {
        request_id: "bench".into(),
        deadline: Duration::from_secs(10),
    }
}

async fn calls(size: Size, table: &mut Table) {
    let file = DriverFile {
        name: MOCK_GPU.to_owned(),
        bytes: wasm(MOCK_GPU, Form::Core).into(),
    };
    let driver = host(None)
        .load(file, grant(), None)
        .await
        .expect("load the driver");
    let claim = DriverClaim {
        id: ObjectRef::new("default", "claim", "uid").expect("names"),
        devices: vec![AllocatedDevice {
            request: "gpu".to_owned(),
            driver: DriverName::new(MOCK_GPU_NAME).expect("a name"),
            pool: PoolName::new("gpus").expect("a name"),
            device: DeviceName::new("gpu-0").expect("a name"),
            share_id: None,
            consumed: Default::default(),
            admin_access: false,
            binding: Default::default(),
        }],
        configs: Vec::new(),
        annotations: Default::default(),
        reserved_for: Vec::new(),
        progress: Vec::new(),
    };
    let (mut prepares, mut discovers) = (Times::default(), Times::default());
    for _ in 0..size.single {
        let outcomes = prepares
            .time(driver.prepare(&call(), std::slice::from_ref(&claim)))
            .await;
        assert!(outcomes.values().all(Result::is_ok), "{outcomes:?}");
        discovers
            .time(driver.discover(&call(), Trigger::Timer))
            .await
            .expect("discover");
    }
    table.times(
        "wasm call: instantiate, prepare",
        &prepares,
        "",
        "no disk, no gRPC",
    );
    let against = "wasm call: instantiate, prepare";
    table.times(
        "wasm call: instantiate, discover",
        &discovers,
        against,
        "4 devices",
    );
}

async fn loads(size: Size, form: Form, table: &mut Table) {
    let bytes = wasm(MOCK_GPU, form);
    let (mut cold, mut cached) = (Times::default(), Times::default());
    for _ in 0..size.loads {
        let cache = tempfile::tempdir().expect("a temporary directory");
        for times in [&mut cold, &mut cached] {
            let host = host(Some(CachePaths::inside(cache.path())));
            let file = DriverFile {
                name: MOCK_GPU.to_owned(),
                bytes: bytes.clone().into(),
            };
            let started = Instant::now();
            let driver = host
                .load(file, grant(), None)
                .await
                .expect("load the driver");
            driver
                .discover(&call(), Trigger::Load)
                .await
                .expect("discover");
            times.add(started.elapsed());
        }
    }
    let size = format!("{} kB file", bytes.len() / 1000);
    table.times(&format!("load, cold, {form:?}"), &cold, "", &size);
    table.times(
        &format!("load, from the cache, {form:?}"),
        &cached,
        &format!("load, cold, {form:?}"),
        "",
    );
}
