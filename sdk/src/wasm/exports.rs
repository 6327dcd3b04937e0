//! The driver's functions with the signatures of the bindings.

use std::marker::PhantomData;
use std::panic::PanicHookInfo;
use std::sync::Once;

use super::bindings::exports::nodedock::driver::{discovery, identity, preparation};
use super::bindings::nodedock::driver::{claims, common, inventory, log};
use super::convert::{Convert, all};
use super::{configuration, health, left_out, scheduling, telemetry};
use crate::{Configuration, Driver, Health, Host, LeftOut, Scheduling, Telemetry};

use configuration::exports::nodedock::driver::configuration as configuration_exports;
use health::exports::nodedock::driver::health as health_exports;
use left_out::exports::nodedock::driver::left_out as left_out_exports;
use scheduling::exports::nodedock::driver::scheduling as scheduling_exports;
use telemetry::exports::nodedock::driver::telemetry as telemetry_exports;

/// Implements the traits of the bindings for a driver.
#[derive(Debug)]
pub struct Exported<D>(PhantomData<D>);

/// Begins a call: from here on the host's log gets a panic before it traps.
fn host() -> Host {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| std::panic::set_hook(Box::new(log_panic)));
    #[cfg(target_family = "wasm")]
    return Host::new(super::Imports);
    #[cfg(not(target_family = "wasm"))]
    return crate::testing::FakeHost::new().host();
}

fn log_panic(info: &PanicHookInfo<'_>) {
    let location = info.location().map(ToString::to_string).unwrap_or_default();
    let message = info.payload_as_str().unwrap_or("panic without a message");
    log::write(
        log::Level::Error,
        "driver panicked",
        &[
            common::KeyValue {
                key: "message".to_owned(),
                value: message.to_owned(),
            },
            common::KeyValue {
                key: "location".to_owned(),
                value: location,
            },
        ],
    );
}

impl<D: Driver> identity::Guest for Exported<D> {
    fn describe() -> identity::DriverInfo {
        host();
        D::describe().convert()
    }
}

impl<D: Driver> discovery::Guest for Exported<D> {
    fn discover(
        ctx: common::Context,
        trigger: discovery::Trigger,
    ) -> Result<inventory::Inventory, common::Problem> {
        let inventory = D::discover(&host(), &ctx.convert(), &trigger.convert());
        inventory.map(Convert::convert).map_err(Convert::convert)
    }
}

impl<D: Driver> preparation::Guest for Exported<D> {
    fn prepare(ctx: common::Context, claims: Vec<claims::Claim>) -> Vec<claims::PrepareOutcome> {
        let claims = all(claims);
        all(D::prepare_batch(&host(), &ctx.convert(), &claims))
    }

    fn unprepare(
        ctx: common::Context,
        claims: Vec<claims::ClaimRecord>,
    ) -> Vec<claims::UnprepareOutcome> {
        let claims = all(claims);
        all(D::unprepare_batch(&host(), &ctx.convert(), &claims))
    }
}

impl<D: Configuration> configuration_exports::Guest for Exported<D> {
    fn config_schema() -> Option<String> {
        host();
        D::config_schema()
    }

    fn parameters_schema() -> Option<String> {
        host();
        D::parameters_schema()
    }

    fn validate_config(config: String) -> Result<(), common::Problem> {
        host();
        D::validate_config(&config).map_err(Convert::convert)
    }

    fn validate_parameters(parameters: String) -> Result<(), common::Problem> {
        host();
        D::validate_parameters(&parameters).map_err(Convert::convert)
    }
}

impl<D: Health> health_exports::Guest for Exported<D> {
    fn check(ctx: common::Context) -> Result<Vec<health_exports::DeviceHealth>, common::Problem> {
        D::check(&host(), &ctx.convert())
            .map(all)
            .map_err(Convert::convert)
    }
}

impl<D: Telemetry> telemetry_exports::Guest for Exported<D> {
    fn read(
        ctx: common::Context,
    ) -> Result<Vec<telemetry_exports::DeviceReadings>, common::Problem> {
        D::read(&host(), &ctx.convert())
            .map(all)
            .map_err(Convert::convert)
    }
}

impl<D: LeftOut> left_out_exports::Guest for Exported<D> {
    fn list_devices(
        ctx: common::Context,
    ) -> Result<Vec<left_out_exports::LeftOutDevice>, common::Problem> {
        D::list_devices(&host(), &ctx.convert())
            .map(all)
            .map_err(Convert::convert)
    }
}

impl<D: Scheduling> scheduling_exports::Guest for Exported<D> {
    fn schedule(
        ctx: common::Context,
        inventory: inventory::Inventory,
    ) -> Result<scheduling_exports::Additions, common::Problem> {
        let additions = D::schedule(&host(), &ctx.convert(), &inventory.convert());
        additions.map(Convert::convert).map_err(Convert::convert)
    }
}
