// What a level, which is compiled from the same sources as all others, is called.
#pragma once

#define NAMED(what, name) NAMED_(what, name)
#define NAMED_(what, name) what##_##name
#define QUOTED(name) QUOTED_(name)
#define QUOTED_(name) #name
