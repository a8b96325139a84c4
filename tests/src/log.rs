//! What the libraries log, on standard error.
#![expect(clippy::print_stderr, reason = "a program that tells its test what it sees")]

use std::fmt::Write;
use tracing::{
    Event, Metadata, Subscriber,
    field::{Field, Visit},
    span,
};

/// Prints every event of ours with its level.
pub struct Log;

impl Subscriber for Log {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("deuteron")
    }

    fn new_span(&self, _: &span::Attributes<'_>) -> span::Id {
        span::Id::from_u64(1)
    }

    fn record(&self, _: &span::Id, _: &span::Record<'_>) {}

    fn record_follows_from(&self, _: &span::Id, _: &span::Id) {}

    fn event(&self, event: &Event<'_>) {
        struct Text(String);
        impl Visit for Text {
            fn record_debug(&mut self, _: &Field, value: &dyn std::fmt::Debug) {
                let _ = write!(self.0, " {value:?}");
            }
        }
        let mut text = Text(event.metadata().level().to_string());
        event.record(&mut text);
        eprintln!("{}", text.0);
    }

    fn enter(&self, _: &span::Id) {}

    fn exit(&self, _: &span::Id) {}
}
