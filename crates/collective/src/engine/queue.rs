//! What user threads have submitted and the engine has not taken yet, and whether its thread must be woken.
//!
//! - QUEUE-1: the thread falls asleep only after it has found the queue empty and said that it sleeps, in one look;
//!   whoever puts something in afterwards sees that and rings. So nothing submitted is left lying.
//!
//! It lives under the lock of the table. `tests/loom.rs` compiles this file over loom's.

/// Events in the order in which they came.
#[derive(Debug)]
pub struct Queue<E> {
    events: Vec<E>,
    asleep: bool,
}

impl<E> Default for Queue<E> {
    fn default() -> Self {
        Self { events: Vec::new(), asleep: false }
    }
}

impl<E> Queue<E> {
    /// Puts an event in. True if the thread sleeps, and the caller has to ring.
    #[must_use]
    pub fn put(&mut self, event: E) -> bool {
        self.events.push(event);
        std::mem::take(&mut self.asleep)
    }

    /// Puts an event in for whoever drives next; the caller sees to it that somebody does.
    pub fn leave(&mut self, event: E) {
        self.events.push(event);
    }

    /// Takes everything out, in exchange for room.
    pub fn take(&mut self, room: &mut Vec<E>) {
        room.clear();
        std::mem::swap(&mut self.events, room);
    }

    /// Says that the thread is about to sleep. False if there is something to do instead.
    pub fn sleep(&mut self) -> bool {
        self.asleep = self.events.is_empty();
        self.asleep
    }

    /// Whether there is nothing to take.
    pub fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    /// Says that the thread is awake.
    pub fn wake(&mut self) {
        self.asleep = false;
    }
}
